#!/bin/bash
# Everything about one sample on several GPUs, on 2, 4 or 8 GPUs of a host, most wanted first; stops
# by itself. On any GPU only one call at a time exchanges through NCCL: two would wait for each other.
#
#     SECONDS_LEFT=590 bash benchmarks/parallel/host.sh COMPLEXES CHAINS MANY FOLDER [PIECES...]
#     DEVICE=cpu GPUS=2 SHORT=64 LONG=96 LONGEST=128 \
#         THREE="--preset small --rows 8 --copies 4 --workers 0" \
#         TWO="--preset small --crop 32 --msa-rows 8 --extra-rows 16 --workers 0" bash ...
#
# MANY: a store with a complex of as many tokens. PIECES: their names, all unless given.
# Rows are kept after each case; `--collect FOLDER/rows` of axial_step and links joins them.
set -u
complexes=$1 chains=$2 many=$3 out=$4
shift 4
pieces=" $* "
end=$((SECONDS + ${SECONDS_LEFT:-590}))
device=${DEVICE:-auto}
if [ "$device" = auto ]; then
  IFS=, read -ra ids <<< "${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index \
    --format=csv,noheader | paste -sd,)}"
  gpus=${GPUS:-${#ids[@]}}
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)
else
  gpus=$GPUS mib=140000 ids=(0 1 2 3 4 5 6 7)
fi
short=${SHORT:-384} long=${LONG:-768}
# What is computed again, in long crops by GPUs a sample, and the longest crops: as memory allows.
if [ "$mib" -gt 100000 ]; then
  keep=none keep_long=([1]=pair [2]=none [4]=none [8]=none) longest=([2]=3584 [4]=5120 [8]=6144)
else
  keep=pair keep_long=([1]=all [2]=all [4]=none [8]=none) longest=([2]=2304 [4]=3200 [8]=4352)
fi
mkdir -p "$out/rows" "$out/logs"

run() { # NAME FIRST_GPU GPUS MOST_SECONDS MODULE ARGUMENTS...
  local name=$1 first=$2 count=$3 most=$4 seconds=$((end - SECONDS))
  shift 4
  [ "$pieces" != "  " ] && [[ "$pieces" != *" $name "* ]] && return
  [ "$seconds" -lt 20 ] && { echo "$SECONDS s: no time for $name"; return; }
  [ "$most" -lt "$seconds" ] && seconds=$most
  echo "$SECONDS s: $name begins"
  CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${ids[*]:first:count}") timeout -s INT -k 8 "$seconds" \
    "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "$count" \
    --master-addr 127.0.0.1 --master-port $((29500 + first)) -m "benchmarks.parallel.$@" \
    --device "$device" > "$out/logs/$name.log" 2>&1
  echo "$SECONDS s: $name ends with $?"
}

three() { # FIRST_GPU GPUS: short crops together, then one each
  local each=()
  [ "$2" -gt 1 ] && each=("$short" --sharing together apart)
  run "alphafold3-$2" "$1" "$2" 120 axial_step alphafold3 "$complexes" --lengths "$short" \
    "${each[@]}" --policies "$keep" --launched 2 --out "$out/rows" ${THREE:-}
}

three_long() {
  run "alphafold3-$2-long" "$1" "$2" 110 axial_step alphafold3 "$complexes" --lengths "$long" \
    --policies "${keep_long[$2]}" --steps 6 --out "$out/rows" ${THREE:-}
}

three_longest() { # little is left: memory must not be in pieces
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True run "longest-$2" "$1" "$2" 240 axial_step \
    alphafold3 "$many" --lengths "${LONGEST:-${longest[$2]}}" --policies all --out "$out/rows" \
    ${THREE:-} --steps 0
}

two() {
  run "alphafold2-$2" "$1" "$2" 160 axial_step alphafold2 "$chains" --policies "$keep" --passes 0 \
    --steps 2 --launched 1 --out "$out/rows" ${TWO:-}
}

exact() {
  run "exactness-$2" "$1" "$2" 100 exactness "$complexes" "$chains" --out "$out"
}

links() {
  run "links-$2" "$1" "$2" 40 links --out "$out/rows"
}

one_each() { # on GPUs 0 and 1
  { three 0 1; three_long 0 1; } &
  two 1 1 &
  wait
}

if [ "$gpus" -ge 4 ]; then
  { two 0 2; one_each; } &
  { three 2 2; three_long 2 2; } &
  [ "$gpus" -ge 8 ] && { two 4 4; three 4 4; three_long 4 4; } &
  wait
  all=$((gpus >= 8 ? 8 : 4))
  two 0 $all
  three 0 $all
  three_long 0 $all
  three_longest 0 $all
  exact 0 $all
  links 0 $all
  three_longest 2 2 &
  { exact 0 2; links 0 2; } &
  [ "$gpus" -ge 8 ] && { three_longest 4 4; links 4 4; } &
  wait
else
  one_each
  three 0 2
  two 0 2
  three_long 0 2
  three_longest 0 2
  exact 0 2
  links 0 2
fi
