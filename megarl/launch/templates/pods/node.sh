#!/usr/bin/env bash
# One node of a run's own Ray, where no KubeRay makes it: number 0 is the head and runs the driver, the others join.
# shellcheck disable=SC1091,SC2154 # job.sh, which `megarl submit` writes, sets names
set -euo pipefail
files=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$files/job.sh"
head=$MEGARL_HEAD
port=${MEGARL_RAY_PORT:-6379}
mkdir -p "$job"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$job/ray_token # nobody else's processes may join
ulimit -n "$(ulimit -Hn)" # Ray needs thousands of open files
ray_options+=(--disable-usage-stats --node-ip-address="$MEGARL_NODE_ADDRESS")

if ((MEGARL_RANK == 0)); then
  (umask 077 && command head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$job/ray_token.new")
  mv "$job/ray_token.new" "$job/ray_token"
  ray start --head --port="$port" "${ray_options[@]}"
  megarl node wait-for-ray --address "$MEGARL_NODE_ADDRESS:$port" --nodes "$nodes" --gpus "$gpus" --deadline "$start_s"
  export RAY_ADDRESS=$MEGARL_NODE_ADDRESS:$port
  exec bash "$files/driver.sh"
fi

answers() { (: <"/dev/tcp/$head/$port") 2>/dev/null; }
until [[ -s $job/ray_token ]] && answers; do
  if ((SECONDS >= start_s)); then
    echo "no Ray at $head:$port after $SECONDS s" >&2
    exit 1
  fi
  sleep 1
done
ray start --address="$head:$port" --block "${ray_options[@]}" &
ray_pid=$!
trap 'kill "$ray_pid" 2>/dev/null || true; exit 0' TERM
silent=0
while kill -0 "$ray_pid" 2>/dev/null && ((silent < 3)); do
  sleep "${MEGARL_LOOK_S:-5}" &
  wait "$!" || true
  if answers; then silent=0; else silent=$((silent + 1)); fi
done
if answers; then
  echo "Ray ended on this node, but not on the first" >&2
  exit 1
fi
kill "$ray_pid" 2>/dev/null || true
wait "$ray_pid" || true
