#!/usr/bin/env bash
# tests/slurm on a Slurm of one node on this machine, without accounting and then with it; it lives in
# a temporary folder and ends with this script. Needs root, and Debian's packages below, which it
# installs where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "make test-slurm starts Slurm's daemons: run it as root" >&2; exit 2; }
packages="slurm-wlm slurmdbd mariadb-server munge"
if ! command -v slurmctld slurmd slurmdbd mariadbd munged >/dev/null; then
  command -v apt-get >/dev/null || { echo "install $packages: no apt-get here" >&2; exit 2; }
  apt-get update -qq
  # shellcheck disable=SC2086  # several packages; their own services are not started
  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $packages
fi
place=$(mktemp -d)
export SLURM_CONF=$place/slurm.conf
stop() { # DAEMON...
  for daemon; do
    [ -e "$place/$daemon.pid" ] || continue
    pid=$(cat "$place/$daemon.pid")
    kill "$pid" 2>/dev/null || continue
    for _ in $(seq 100); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
  done
}
finish() {
  scancel --user root 2>/dev/null || true # of this Slurm: SLURM_CONF says which
  sleep 1
  stop slurmctld slurmd slurmdbd mariadbd munged
  rm -rf "$place"
}
trap finish EXIT
answers() { # COMMAND...: waits until it does
  for _ in $(seq 60); do
    "$@" >/dev/null 2>&1 && return
    sleep 1
  done
  echo "$*: no answer within 60 s" >&2
  return 1
}
mkdir "$place/state" "$place/spool"
chmod 755 "$place"
dd if=/dev/urandom of="$place/key" bs=1 count=1024 status=none
chmod 400 "$place/key"
munged --key-file "$place/key" --socket "$place/munge" --pid-file "$place/munged.pid" \
  --log-file "$place/munged.log" --seed-file "$place/seed" --force
host=$(hostname -s)
echo 'CgroupAutomount=no' >"$place/cgroup.conf"

slurm() { # STORAGE LINE...: starts controller and node with that accounting
  # a requeued job waits until its credentials have expired
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$place/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/spool
SlurmctldLogFile=$place/slurmctld.log
SlurmdLogFile=$place/slurmd.log
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerParameters=sched_interval=2
KillWait=5
MinJobAge=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=cpu Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
$(printf '%s\n' "$@")
CONF
  slurmctld -f "$SLURM_CONF"
  slurmd -f "$SLURM_CONF"
  answers eval 'sinfo -h -o %T | grep -q idle'
  sinfo
}

slurm AccountingStorageType=accounting_storage/none
KHA_TEST_SLURM=alone .venv/bin/python -m pytest -m slurm tests/slurm "$@"
stop slurmctld slurmd

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
echo "$accounting" >>"$SLURM_CONF" # which sacctmgr reads too
sed -i '/accounting_storage\/none/d' "$SLURM_CONF"
answers sacctmgr -n show cluster
sacctmgr -i -Q add cluster test
rm -rf "$place/state" && mkdir "$place/state" # jobs of a cluster that had no accounts
slurm "$accounting"
KHA_TEST_SLURM=accounts .venv/bin/python -m pytest -m slurm tests/slurm -k "forgotten or fails" "$@"
