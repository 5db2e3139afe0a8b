"""One description of a run: its model, its layout, its batch."""
