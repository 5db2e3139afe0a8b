"""Shell commands that we add to NeMo-Run's batch script for Slurm."""

from kha_megatron.recipes.prepare import Slurm

FIND_FIRST_NODE = """\
case $head_node_ip in "" | 127.* | ::1*)
  echo "error: Node $head_node resolves its own host name to '$head_node_ip'. It must resolve to \
an address that other nodes can reach. Fix its /etc/hosts or DNS." >&2
  exit 1 ;;
esac
node_address=$(scontrol show node "$head_node" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
head_node_ip=${node_address:-${head_node_ip%% *}}"""
"""Replaces the result of ``hostname --ip-address`` on the first node.

NeMo-Run passes it to torchrun, but it may contain several addresses or start with IPv6 addresses.
Slurm's own address of the node is reachable from the other nodes. An unresolvable host name is an
error, because torchrun and gloo resolve it too.
"""

_RUN_RANKS = r"""
retries=@RETRIES@
show_job() { timeout 60 scontrol show job --oneliner "$SLURM_JOB_ID"; }
retry() { # if there are retries left. A job that was preempted has not used one.
  echo failed >>"$failures"
  [ "$(wc -l <"$failures")" -le $retries ] && scontrol requeue "$SLURM_JOB_ID"
}
was_stopped() { # torchrun received SIGTERM: preemption, or scancel --signal
  # if a rank failed before, srun has ended the other nodes
  awk '/Root Cause/ { exit } /SignalException: Process .* got signal: 15/ { stopped = 1; exit }
    END { exit !stopped }' "$log"
}
on_sigterm() { # the time limit, scancel or scontrol requeue
  if show_job | grep -q 'Reason=TimeLimit'; then retry; fi
}
srun() { # called below to start the ranks
  log=${2//%j/$SLURM_JOB_ID}
  failures=${log%_*}.failures
  trap on_sigterm TERM
  command srun "$@" &
  wait $!
  code=$?
  while kill -0 $! 2>/dev/null; do # wait was interrupted
    wait $!
    code=$?
  done
  [ $code = 0 ] && return 0
  show_job | grep -q 'JobState=RUNNING' || return $code # Slurm ends or requeues the job
  if was_stopped; then
    scontrol requeue "$SLURM_JOB_ID"
  elif ! retry; then
    end_chain_if_invalid
  fi
  return $code
}""".strip()

_NO_CHAIN = "end_chain_if_invalid() { :; }"
_CHAIN = r"""
end_chain_if_invalid() { # the next jobs would reject the same arguments or files
  awk '/Root Cause/ { report = 1 } report && $1 == "time" { time = $3 }
    report && $1 == "exitcode" && (!first || time < first) { first = time; code = $3 }
    $1 == "exitcode" { report = 0 }
    END { exit code != 2 }' "$log" && cancel_dependents "$SLURM_JOB_ID"
}
cancel_dependents() {
  local job
  for job in $(squeue -h -u "$UID" -o '%i %E' | grep ":$1\b" | cut -d' ' -f1); do
    cancel_dependents "$job"
    scancel "$job"
  done
}""".strip()


def run_ranks(slurm: Slurm) -> str:
    """Return commands that define a shell function ``srun``, which replaces NeMo-Run's.

    - If a rank fails or the job reaches its time limit, it is requeued ``slurm.retries`` times.
      NeMo-Run's template does not notice time limits, and counts preemptions as retries.
    - If the ranks were stopped by SIGTERM, e.g. before a preemption, the job is always requeued.
    - If the arguments are invalid, the remaining jobs of a chain are canceled.
    """
    commands = _RUN_RANKS.replace("@RETRIES@", str(slurm.retries))
    return "\n".join([commands, _CHAIN if slurm.chain > 1 else _NO_CHAIN])
