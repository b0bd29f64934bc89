#!/bin/bash
# Everything about one sample on several GPUs, on 2 or 4 GPUs of a host, most wanted first; stops by
# itself. On any GPU only one call at a time exchanges through NCCL: two would wait for each other.
#
#     SECONDS_LEFT=400 bash benchmarks/parallel/host.sh COMPLEXES CHAINS LONGEST FOLDER [PIECES...]
#     DEVICE=cpu GPUS=2 SHORT=64 LONG=96 LONGEST_2=128 LONGEST_4=160 \
#         THREE="--preset small --rows 8 --copies 4 --workers 0" \
#         TWO="--preset small --crop 32 --msa-rows 8 --extra-rows 16 --workers 0" bash ...
#
# LONGEST: a store with a complex of as many tokens. PIECES: their names, all unless given.
# Rows are kept after each case; `--collect FOLDER/rows` of axial_step and links joins them.
set -u
complexes=$1 chains=$2 longest=$3 out=$4
shift 4
pieces=" $* "
end=$((SECONDS + ${SECONDS_LEFT:-590}))
device=${DEVICE:-auto}
if [ "$device" = auto ]; then
  gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)
else
  gpus=$GPUS mib=140000
fi
short=${SHORT:-384} long=${LONG:-768}
# What is computed again, and the longest crops, as planned for the memory of a GPU.
if [ "$mib" -gt 100000 ]; then
  keep=none keep_long=(pair all) keep_2=none longest_2=${LONGEST_2:-3200} longest_4=${LONGEST_4:-4352}
else
  keep=pair keep_long=(all) keep_2=all longest_2=${LONGEST_2:-2304} longest_4=${LONGEST_4:-3200}
fi
mkdir -p "$out/rows" "$out/logs"

run() { # NAME FIRST_GPU GPUS MOST_SECONDS MODULE ARGUMENTS...
  local name=$1 first=$2 count=$3 most=$4 seconds=$((end - SECONDS))
  shift 4
  [ "$pieces" != "  " ] && [[ "$pieces" != *" $name "* ]] && return
  [ "$seconds" -lt 20 ] && { echo "$SECONDS s: no time for $name"; return; }
  [ "$most" -lt "$seconds" ] && seconds=$most
  echo "$SECONDS s: $name begins"
  CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + count - 1))) timeout -s INT -k 4 "$seconds" \
    "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "$count" \
    --master-addr 127.0.0.1 --master-port $((29500 + first)) -m "benchmarks.parallel.$@" \
    --device "$device" > "$out/logs/$name.log" 2>&1
  echo "$SECONDS s: $name ends with $?"
}

three() { # NAME FIRST_GPU GPUS MOST_SECONDS ARGUMENTS...
  run "${@:1:4}" axial_step alphafold3 "$complexes" --out "$out/rows" "${@:5}" ${THREE:-}
}

three_longest() { # GPUS FIRST_GPU TOKENS
  run "longest-$1" "$2" "$1" 100 axial_step alphafold3 "$longest" --lengths "$3" --policies all \
    --out "$out/rows" ${THREE:-} --steps 0
}

two() { # NAME FIRST_GPU GPUS MOST_SECONDS
  run "${@:1:4}" axial_step alphafold2 "$chains" --policies "$keep" --passes 0 --steps 3 \
    --out "$out/rows" ${TWO:-}
}

together() { # FIRST_GPU GPUS POLICY
  three "alphafold3-$2" "$1" "$2" 130 --lengths "$short" "$short" "$long" \
    --policies "$keep" "$keep" "$3" --sharing together apart together
}

again() { # FIRST_GPU: what may have had too little memory
  [ -e "$out/rows/step-alphafold3-$long-1-$keep_2-2-2-.json" ] ||
    three alphafold3-2-again "$1" 2 70 --lengths "$long" --policies "${keep_long[0]}"
}

exact() { # FIRST_GPU GPUS
  run "exactness-$2" "$1" "$2" 100 exactness "$complexes" "$chains" --out "$out"
}

links() {
  run "links-$2" "$1" "$2" 40 links --out "$out/rows"
}

one_each() { # GPUs 0 and 1
  three alphafold3-1 0 1 130 --lengths "$short" ${keep_long[@]/*/$long} \
    --policies "$keep" "${keep_long[@]}" &
  two alphafold2-1 1 1 130 &
  wait
}

if [ "$gpus" -ge 4 ]; then
  { two alphafold2-2 0 2 125; one_each; } &
  together 2 2 "$keep_2" &
  wait
  together 0 4 none
  two alphafold2-4 0 4 100
  { again 2; three_longest 2 2 "$longest_2"; } &
  { exact 0 2; links 0 2; } &
  wait
  three_longest 4 0 "$longest_4"
  links 0 4
else
  one_each
  together 0 2 "$keep_2"
  two alphafold2-2 0 2 100
  three_longest 2 0 "$longest_2"
  again 0
  exact 0 2
  links 0 2
fi
three behind 0 "$gpus" 60 --lengths "$short" --policies "$keep" --sharing apart --behind
