#!/usr/bin/env bash
# Tests the job of docs/cluster.md under SLURM: starts a cluster of one node on this machine, and takes it down again. Run as
# root, with the Debian packages slurm-wlm and munge: scripts/slurm.sh FOLDER. The text and the runs are written to FOLDER.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && cd "$1"
work=$PWD state=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait; rm -rf "$state"' EXIT

chmod 755 "$state" # munged refuses a folder that others may write to, but they must be able to reach its socket
dd if=/dev/urandom of="$state/munge.key" bs=128 count=1 status=none
chmod 600 "$state/munge.key"
munged --foreground --force --key-file="$state/munge.key" --socket="$state/munge" --num-threads=1 \
  --pid-file="$state/munged.pid" --log-file="$state/munged.log" --seed-file="$state/munged.seed" >"$state/munged.out" 2>&1 &
started+=($!)

node=$(hostname -s) cores=$(nproc)
cat >"$state/slurm.conf" <<END
ClusterName=one
SlurmctldHost=$node
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge
CredType=cred/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SlurmctldPort=47817
SlurmdPort=47818
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/spool
SlurmctldPidFile=$state/ctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/ctld.log
SlurmdLogFile=$state/slurmd.log
ReturnToService=2
NodeName=$node CPUs=$cores
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP
END
mkdir "$state/ctld" "$state/spool"
export SLURM_CONF=$state/slurm.conf
for _ in {1..50}; do [[ -S $state/munge ]] && break; sleep 0.1; done
slurmctld -D >"$state/ctld.out" 2>&1 &
started+=($!)
slurmd -D >"$state/slurmd.out" 2>&1 &
started+=($!)
for _ in {1..100}; do sinfo --noheader --format=%T 2>/dev/null | grep -q idle && break; sleep 0.3; done
sinfo || { tail -n 20 "$state"/*.log "$state"/*.out; exit 1; }

section() { printf '\n=== %s (%s s)\n' "$1" "$SECONDS"; }
export PYTHONPATH=$root JAX_DISABLE_MOST_OPTIMIZATIONS=1
for number in {1..2000}; do echo "line $number"; done >text.txt
printf '[model]\nembed = 16\nlayers = 1\nheads = 8\nkv_heads = 8\nhead_size = 4\nfeed_forward = 32\n' >small.toml
flags="--config small.toml --platform cpu --devices 8 --batch 8 --length 16 --steps 200 --save-every 20 --validation-every 0
  --final-validation-batches 1 --sample-bytes 0 --data text.txt"
flags=${flags//$'\n'/}
cat >job <<END
#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --overcommit
#SBATCH --output=%j.log
resume=\$(ls two/checkpoints 2>/dev/null | grep -qx '[0-9]*' && echo --resume)
srun --overcommit --kill-on-bad-exit=1 bash -c 'echo \$\$ >pid.\$SLURM_PROCID; exec python "\$0" "\$@"' \\
  "$root/scripts/train_moe.py" $flags --distributed auto --out two \$resume
END
submit() { job=$(sbatch --parsable job); echo "job $job"; }
finish() { # waits for the job; prints its state, its exit code and the last lines of its log
  while squeue --noheader --job "$job" 2>/dev/null | grep -q .; do sleep 0.2; done
  scontrol show job "$job" | grep -oE '(JobState|ExitCode)=[^ ]*'
  grep -vE '^(step|[┏┃┡│├└]|srun: Job)' "$job.log" | tail -n "$1"
}

section "one process of 8 devices"
# shellcheck disable=SC2086
python "$root/scripts/train_moe.py" $flags --out one | tail -n 2

section "two processes of 4 devices, one of which is killed"
submit
until [[ -d two/checkpoints/40 ]]; do sleep 0.1; done
kill -KILL "$(<pid.1)"
finish 6

section "the same job once more"
submit
finish 4

section "the losses"
python - <<'END'
import json
one, two = ([row["loss"] for row in map(json.loads, open(f"{run}/metrics.jsonl")) if "loss" in row] for run in ("one", "two"))
largest = max(abs(a - b) for a, b in zip(one, two, strict=True))
print(f"{len(two)} steps, whose losses differ by at most {largest:.1e}")
assert len(two) == 200 and largest < 1e-4
END
