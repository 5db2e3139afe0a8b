#!/usr/bin/env bash
# Run tests/slurm on a Slurm cluster on this machine, without accounting and then with it. It has three nodes that
# fail, one for jobs on one node, which run at the same time, and one for jobs that are preempted.
# Needs root and Debian's packages below, which are installed if they are missing.
#
# Each node has its own network, host name, processes, /tmp and slurmd. Nodes share one writable
# directory. The cluster runs in namespaces of its own, so when this script ends for any reason, the
# kernel kills all processes and removes the nodes, their network and their mounts.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
nodes="kn1 kn2 kn3 kn4 kn5" # tests/slurm/cluster.py uses these names and addresses
network=10.77.0

# Modes of this script: (none) -> cluster -> node -> slurmd
start() { # PYTEST_OPTION...
  local packages="slurm-wlm slurmdbd mariadb-server munge iproute2"
  if [ "$(id -u)" != 0 ] || [[ $checkout == /tmp/* ]]; then
    echo "error: make test-slurm must run as root and outside of /tmp, which nodes do not share" >&2
    exit 2
  fi
  if ! type slurmctld slurmd slurmdbd mariadbd munged ip >/dev/null 2>&1; then
    command -v apt-get >/dev/null || { echo "error: apt-get not found. Install $packages." >&2; exit 2; }
    apt-get update -qq
    # shellcheck disable=SC2086  # several packages; their own services are not started
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $packages
  fi
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  place=$(mktemp -d /srv/kha-slurm.XXXXXX)
  chmod 755 "$place"
  setpriv --pdeathsig KILL unshare --net --uts --mount --pid --fork --kill-child --mount-proc \
    "$0" cluster "$place" "$@" &
  wait $!
}

finish() {
  [ -z "${!:-}" ] || kill -KILL $! 2>/dev/null || true
  until rm -rf "${place:-/srv/kha-slurm}" 2>/dev/null; do sleep 0.1; done # processes are ending
}

cluster() { # PLACE PYTEST_OPTION...
  place=$1
  shift
  export SLURM_CONF=$place/slurm.conf
  mkdir "$place/shared" "$place/tmp" "$place/state"
  mount -t tmpfs tmpfs /run
  mount --bind "$place/tmp" /tmp
  mount --bind "$place/shared" "$place/shared"
  mount --make-rshared "$place/shared" # nodes see what tests mount in it
  hostname login
  ip link set lo up
  ip link add bridge type bridge
  ip address add $network.254/24 dev bridge
  ip link set bridge up
  printf '127.0.0.1 localhost\n%s login\n' $network.254 >"$place/hosts"
  for name in $nodes; do
    mkdir -p "$place/$name/spool"
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip link set "$name" master bridge up
    ip -n "$name" address add "$network.${name#kn}/24" dev eth0
    ip -n "$name" address add "2001:db8::${name#kn}/64" dev eth0 nodad
    ip -n "$name" link set eth0 up
    ip -n "$name" link set lo up
    echo "$network.${name#kn} $name" >>"$place/hosts"
  done
  mount --bind "$place/hosts" /etc/hosts
  dd if=/dev/urandom of="$place/key" bs=1 count=1024 status=none
  chmod 400 "$place/key"
  munged --key-file "$place/key" --socket "$place/munge" --pid-file "$place/munged.pid" \
    --log-file "$place/munged.log" --seed-file "$place/seed" --force
  echo 'CgroupAutomount=no' >"$place/cgroup.conf"

  slurm AccountingStorageType=accounting_storage/none
  KHA_TEST_SLURM=alone run_pytest "$@"
  stop slurmctld $nodes
  start_accounting
  slurm "$accounting"
  KHA_TEST_SLURM=accounts run_pytest --dist load -k "forgotten or fails" "$@"
}

run_pytest() { # PYTEST_OPTION...
  "$checkout/.venv/bin/python" -m pytest -n 2 --dist loadfile -m slurm tests/slurm --basetemp "$place/shared/tests" "$@"
}

slurm() { # ACCOUNTING_LINES: starts the controller and all nodes
  # a requeued job waits until its credentials have expired
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=login($network.254)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$place/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/%n/spool
SlurmctldLogFile=$place/slurmctld.log
SlurmdLogFile=$place/%n/slurmd.log
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=$place/prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerParameters=sched_interval=2
SlurmdTimeout=15
KillWait=5
MinJobAge=10
ReturnToService=2
TreeWidth=65533
$(for name in $nodes; do echo "NodeName=$name NodeAddr=$network.${name#kn} CPUs=2 State=UNKNOWN"; done)
PartitionName=DEFAULT MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
PartitionName=three Nodes=kn[1-3] Default=YES
PartitionName=one Nodes=kn4
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=grace Nodes=kn5 GraceTime=120 OverSubscribe=NO
PartitionName=no-grace Nodes=kn5 GraceTime=0 OverSubscribe=NO
PartitionName=urgent Nodes=kn5 PriorityTier=2 OverSubscribe=NO
$1
CONF
  # the first step asks for the node's address
  printf '#!/bin/sh\n[ ! -e /tmp/late ] || [ "$SLURM_STEP_ID" = 0 ] || sleep "$(cat /tmp/late)"\n' >"$place/prolog"
  chmod 755 "$place/prolog"
  slurmctld -f "$SLURM_CONF"
  for name in $nodes; do "$0" node "$name" & done
  answers eval '[ "$(sinfo -h -N -t idle -o %N | sort -u | wc -l)" = 5 ]'
  sinfo
}

node() { # NAME
  local place=${SLURM_CONF%/*}
  cp "$place/hosts" "$place/$1/hosts"
  echo $$ >"$place/$1.pid"
  exec nsenter --net="/run/netns/$1" unshare --uts --mount --propagation slave --pid --fork --kill-child --mount-proc \
    "$0" slurmd "$1" \
    >>"$place/$1/out" 2>&1
}

slurmd_() { # NAME: runs inside the node
  local place=${SLURM_CONF%/*} software number=0
  # `make setup` may use a Python interpreter and an environment outside of the checkout
  software=$(printf '%s\n' "$checkout" "$(readlink -f .venv)" "$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')")
  hostname "$1"
  for writable in "$place/$1" "$place/shared"; do mount --rbind "$writable" "$writable"; done
  mount -o remount,bind,ro /
  for folder in $software; do
    mkdir -p "$place/$1/software/$((++number))"
    mount --bind "$folder" "$place/$1/software/$number"
  done
  for folder in /tmp /var/tmp /dev/shm /run /root /home; do
    mount -t tmpfs -o size=64m tmpfs "$folder"
  done
  number=0
  for folder in $software; do
    mkdir -p "$folder"
    mount --bind "$place/$1/software/$((++number))" "$folder"
  done
  mount --bind "$place/$1/hosts" /etc/hosts
  slurmd -D -N "$1" -f "$SLURM_CONF" & # this shell is the init process, which reaps orphans
  wait
}

stop() { # DAEMON_OR_NODE...
  local pid
  for name; do
    pid=$(cat "$place/$name.pid")
    kill -KILL "$pid" 2>/dev/null || continue
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
  done
}

answers() { # COMMAND...: waits until it succeeds
  for _ in $(seq 60); do
    "$@" >/dev/null 2>&1 && return
    sleep 1
  done
  echo "$*: no answer within 60 s" >&2
  return 1
}

start_accounting() {
  mariadb-install-db --user=root --datadir="$place/accounts" >"$place/install.log"
  mariadbd --no-defaults --user=root --datadir="$place/accounts" --bind-address=127.0.0.1 --port=16819 \
    --socket="$place/sql" --pid-file="$place/mariadbd.pid" 2>"$place/mariadbd.log" &
  answers mariadb --no-defaults --socket "$place/sql" -e 'select 1'
  mariadb --no-defaults --socket "$place/sql" -e "create database slurm_acct_db;
    create user slurm@'127.0.0.1' identified by 'x', slurm@localhost identified by 'x';
    grant all on slurm_acct_db.* to slurm@'127.0.0.1'; grant all on slurm_acct_db.* to slurm@localhost;"
  cat >"$place/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$place/munge
DbdHost=localhost
DbdPort=16820
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=16819
StorageUser=slurm
StoragePass=x
StorageLoc=slurm_acct_db
LogFile=$place/slurmdbd.log
PidFile=$place/slurmdbd.pid
CONF
  chmod 600 "$place/slurmdbd.conf"
  slurmdbd
  accounting="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=16820
AccountingStoragePass=$place/munge" # with munge, its socket
  echo "$accounting" >>"$SLURM_CONF" # sacctmgr reads it too
  sed -i '/accounting_storage\/none/d' "$SLURM_CONF"
  answers sacctmgr -n show cluster
  sacctmgr -i -Q add cluster test
  rm -rf "$place/state" && mkdir "$place/state" # jobs of a cluster that had no accounts
}

case ${1:-} in
cluster | node) "$@" ;;
slurmd) slurmd_ "$2" ;;
*) start "$@" ;;
esac
