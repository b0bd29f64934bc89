#!/bin/bash
# Everything about one sample on several GPUs, on all GPUs of a host, most wanted first; stops by
# itself. Only one call at a time exchanges through NCCL: two would wait for each other's time slices.
#
#     SECONDS_LEFT=590 bash benchmarks/parallel/host.sh COMPLEXES CHAINS FOLDER
#     DEVICE=cpu GPUS=2 SHORT=64 LONG=96 THREE="--preset small --rows 8 --copies 4 --steps 1" \
#         TWO="--preset small --crop 32 --msa-rows 8 --extra-rows 16 --steps 1" bash ...
#
# Rows are kept after each case; `--collect FOLDER/rows` of axial_step and links joins them.
set -u
complexes=$1 chains=$2 out=$3
end=$((SECONDS + ${SECONDS_LEFT:-590}))
short=${SHORT:-384} long=${LONG:-768} device=${DEVICE:-auto} gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
mkdir -p "$out/rows" "$out/logs"

run() { # NAME FIRST_GPU GPUS MODULE ARGUMENTS...
  local name=$1 first=$2 count=$3 seconds=$((end - SECONDS))
  shift 3
  [ "$seconds" -lt 20 ] && { echo "$SECONDS s: no time for $name"; return; }
  echo "$SECONDS s: $name begins"
  CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + count - 1))) timeout -s INT -k 9 "$seconds" \
    "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "$count" \
    --master-addr 127.0.0.1 --master-port $((29500 + first)) -m "benchmarks.parallel.$@" \
    --device "$device" > "$out/logs/$name.log" 2>&1
  echo "$SECONDS s: $name ends with $?"
}

three() { # NAME FIRST_GPU GPUS ARGUMENTS...
  run "$1" "$2" "$3" axial_step alphafold3 "$complexes" --out "$out/rows" "${@:4}" ${THREE:-}
}

two() {
  run "$1" "$2" "$3" axial_step alphafold2 "$chains" --passes 0 --steps 3 --out "$out/rows" \
    "${@:4}" ${TWO:-}
}

three alphafold3-1 0 1 --lengths "$short" &
two alphafold2-1 1 1 &
wait
for count in $(for size in 2 4 8; do [ "$size" -le "$gpus" ] && echo "$size"; done); do
  three "alphafold3-$count" 0 "$count" --lengths "$short"
  two "alphafold2-$count" 0 "$count"
done
three alphafold3-long-1 0 1 --lengths "$long" --policies all --steps 4
three alphafold3-long-2 0 2 --lengths "$long" "$long" --policies all none --steps 4
run links 0 "$gpus" links --out "$out/rows"
run exactness 0 "$gpus" exactness "$complexes" "$chains" --out "$out"
three apart 0 "$gpus" --lengths "$short" --apart
three apart-behind 0 "$gpus" --lengths "$short" --apart --behind
