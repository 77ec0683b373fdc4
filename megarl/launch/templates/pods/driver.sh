#!/usr/bin/env bash
# What drives a run, in its pod: the driver of Ray's run, or one node's ranks under torchrun.
# A pod that is told to go (warn.sh, SIGTERM) and the time limit warn the run once: it saves after the step in progress and
# leaves with exit code 75, with which it is started again. A second signal would interrupt it.
# shellcheck disable=SC1091,SC2154 # job.sh, which `megarl submit` writes, sets names
set -euo pipefail
set -m # the run is a process group of its own: who ends this script by a signal to its group warns the run once
files=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$files/job.sh"
cd "$workdir"
say() { echo "$(date +%H:%M:%S) $*"; }
rank=${MEGARL_RANK:-0}
mkdir -p "$job"
if [[ -n $ended && -s $ended ]]; then # KubeRay tries again whatever the exit code was
  say "the run ended with exit code $(<"$ended"); to start it again, submit it again, or remove $ended"
  exit "$(<"$ended")"
fi
if ((rank == 0)); then
  rm -f "$job"/{warned,left,stopped,driver.pid}
  touch "$job/alive"
fi
if [[ -d $run/checkpoints ]]; then arguments+=(run.resume=auto); else arguments+=("run.resume=$resume"); fi

# Before the run listens to the warning it has nothing to save: the warning is ignored until then.
if [[ $launcher == torchrun ]]; then
  (
    trap '' USR1
    exec torchrun --nnodes="$nodes" --node-rank="$rank" --nproc-per-node="$ranks_per_node" \
      --master-addr="$MEGARL_HEAD" --master-port=29500 --no-python bash "$files/rank.sh" "$job" "${arguments[@]}"
  ) &
else
  (
    trap '' USR1
    exec megarl train "${arguments[@]}"
  ) &
fi
run_pid=$!

warned=
warn() {
  local pid=$run_pid
  if [[ -n $warned ]]; then return 0; fi
  if [[ $launcher == torchrun ]]; then
    ((rank == 0)) || return 0 # the first rank tells the others
    if [[ ! -s $job/driver.pid ]]; then return 0; fi
    pid=$(<"$job/driver.pid")
  fi
  warned=yes
  say "warned by $1: the run saves and leaves"
  kill -USR1 "$pid" 2>/dev/null || true
}
trap 'warn SIGTERM' TERM
trap 'warn SIGUSR1' USR1
while kill -0 "$run_pid" 2>/dev/null; do
  if ((rank == 0)); then touch "$job/alive"; fi
  if [[ -e $job/warned ]]; then warn "a pod that goes"; fi
  if ((SECONDS >= limit_s)); then warn "its time limit"; fi
  sleep "${MEGARL_LOOK_S:-2}" &
  wait "$!" || true # a signal interrupts it
done
code=0
wait "$run_pid" || code=$?
if [[ $launcher == torchrun && -e $job/stopped ]]; then code=75; fi
if ((rank == 0)); then
  : >"$job/left"
  rm -f "$job/ray_token"
fi
if [[ -n $ended ]] && ((code != 0 && code != 75 && code < 128)); then echo "$code" >"$ended"; fi
say "the run left with exit code $code"
exit "$code"
