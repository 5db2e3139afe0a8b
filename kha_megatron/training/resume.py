def check_same_kha(args, kha):
    pass
