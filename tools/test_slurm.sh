#!/usr/bin/env bash
# tests/slurm on a Slurm of one node on this machine, which lives in a temporary folder and ends with
# this script. Needs root, and Debian's slurm-wlm and munge, which it installs where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "make test-slurm starts Slurm's daemons: run it as root" >&2; exit 2; }
if ! command -v slurmctld slurmd munged >/dev/null; then
  command -v apt-get >/dev/null || { echo "install slurm-wlm and munge: no apt-get here" >&2; exit 2; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
fi
place=$(mktemp -d)
stop() {
  scancel --user root 2>/dev/null || true # of this Slurm: SLURM_CONF says which
  sleep 1
  for pid in "$place"/slurmctld.pid "$place"/slurmd.pid "$place"/munged.pid; do
    [ -e "$pid" ] && kill "$(cat "$pid")" || true
  done
  sleep 2
  rm -rf "$place"
}
trap stop EXIT
mkdir "$place/state" "$place/spool"
chmod 755 "$place"
dd if=/dev/urandom of="$place/key" bs=1 count=1024 status=none
chmod 400 "$place/key"
munged --key-file "$place/key" --socket "$place/munge" --pid-file "$place/munged.pid" \
  --log-file "$place/munged.log" --seed-file "$place/seed" --force
host=$(hostname -s)
export SLURM_CONF=$place/slurm.conf
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
AccountingStorageType=accounting_storage/none
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=cpu Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
echo 'CgroupAutomount=no' >"$place/cgroup.conf"
slurmctld -f "$SLURM_CONF"
slurmd -f "$SLURM_CONF"
for _ in $(seq 30); do
  sinfo -h -o %T 2>/dev/null | grep -q idle && break
  sleep 1
done
sinfo
KHA_TEST_SLURM=1 .venv/bin/python -m pytest -m slurm tests/slurm "$@"
