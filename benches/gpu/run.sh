#!/usr/bin/env bash
# Tests and benchmarks the CUDA engine on device 0: `run.sh [test|bench]`, both without a word. Needs an NVIDIA driver and
# cublasLt (of CUDA 12 or 13: an installed toolkit, or the Python package that PyTorch brings); python3 with numpy for
# the checkpoints; torch and transformers for the oracle; what else is not there is left out and named.
#
# RESULTS=DIR   where a directory <day>-<device> with the figures is made (default: results, beside this script)
# SCRATCH=DIR   where checkpoints are kept, 0.9 GiB (default: scratch, beside this script)
# PYTHON=...    the Python that has torch (default: python3)
# SIZE=tiny     a tiny model and few figures: to try the script itself where there is no card
# LIMIT=590     seconds; what has not begun by then is not run, and named
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
section=${1:-all}
case $section in
    all | test | bench) ;;
    *)
        echo "usage: run.sh [test|bench]" >&2
        exit 2
        ;;
esac

here=$PWD
results=${RESULTS:-$here/results}
scratch=${SCRATCH:-$here/scratch}
python=${PYTHON:-python3}
limit=${LIMIT:-590}
mkdir -p "$results" "$scratch" || exit 1
results=$(cd "$results" && pwd)
scratch=$(cd "$scratch" && pwd)
raw=$scratch/figures
mkdir -p "$raw"
if [ "${SIZE:-}" = tiny ]; then
    models=(tiny)
    bench=(--seconds 0.01 --matmul 128 --lengths 16,64 --texts 24 --passes 128,256)
    rivals=(--seconds 0.01 --lengths 16,64 --texts 24)
    # A quick one of each.
    kernel_tests=(sequences_do_not_meet)
    engine_tests=(every_head)
else
    models=(bert-base minilm bert-large)
    bench=()
    rivals=()
    kernel_tests=()
    engine_tests=()
fi
directories=("${models[@]/#/$scratch/}")

summary=()
failed=0
# say WORD NAME [REASON]: for the list at the end.
say() {
    summary+=("$(printf '%-8s %s%s' "$1" "$2" "${3:+: $3}")")
    [ "$1" = FAILED ] && failed=1
    printf '%s\n' "---- ${summary[-1]}"
}
# step SECONDS NAME COMMAND...: runs it, within that time and the limit of all.
step() {
    local seconds=$1 name=$2 begin=$SECONDS code=0
    shift 2
    printf '\n==== %s ====\n' "$name"
    [ $((limit - SECONDS)) -lt "$seconds" ] && seconds=$((limit - SECONDS))
    if [ "$seconds" -lt 2 ]; then
        say "not run" "$name" "no time left of $limit s"
        failed=1
        return 1
    fi
    # A function of this script needs a shell that has it.
    if [ "$(type -t "$1")" = function ]; then
        set -- bash -uc "$(declare -p ours scratch here); $(declare -f "$1"); $(printf '%q ' "$@")"
    fi
    timeout --kill-after=5 "$seconds" "$@" || code=$?
    case $code in
        0) say ok "$name ($((SECONDS - begin)) s)" ;;
        124 | 137) say FAILED "$name" "not done after $seconds s" ;;
        *) say FAILED "$name" "exit code $code" ;;
    esac
    return "$code"
}
# Of our programs alone: PyTorch brings libraries of its own.
libraries=${LD_LIBRARY_PATH:-}
ours=()
use_libraries() {
    libraries=$1
    ours=(env "LD_LIBRARY_PATH=$libraries" TRITON_RUST_REAL_GPU=1 "TRITON_RUST_MINILM=$scratch/all-MiniLM-L6-v2")
}
# Fails, too, where no test has run: a name may have changed.
tests() {
    local program=$1
    shift
    "${ours[@]}" "bin/$program" --skip software:: "$@" | tee "$scratch/$program.log"
    [ "${PIPESTATUS[0]}" = 0 ] && grep -qE '^test result: ok\. [1-9]' "$scratch/$program.log"
}
twin() {
    "${ours[@]}" bin/gpu twin "$scratch/twin.device" &&
        env LD_LIBRARY_PATH="$here/software" bin/gpu twin "$scratch/twin.host" &&
        bin/gpu same "$scratch/twin.device" "$scratch/twin.host"
}
has() { "$python" -c "import $1" 2>/dev/null; }

# Where the driver and cublasLt are: what the loader finds, else the usual places, else PyTorch's.
chmod -f +x bin/* 2>/dev/null
wheels=$("$python" -c '
import glob, site, sys
for folder in dict.fromkeys(site.getsitepackages() + sys.path):
    for found in glob.glob(folder + "/nvidia/*/lib/libcublasLt.so.1[23]"):
        print(found.rsplit("/", 1)[0])
' 2>/dev/null)
found=no
reason=
for driver in "" /usr/local/nvidia/lib64 /usr/lib/wsl/lib; do
    for blas in "" /usr/local/cuda/lib64 $wheels; do
        use_libraries "$(printf '%s:' "$driver" "$blas" "${LD_LIBRARY_PATH:-}" | sed -E 's/:+/:/g; s/^://; s/:$//')"
        if facts=$("${ours[@]}" bin/gpu facts 2>&1); then
            found=yes
            break 2
        fi
        reason=${reason:-$facts}
        case $facts in *cublasLt*) reason=$facts ;; esac
    done
done
if [ $found = no ]; then
    printf 'No GPU that the CUDA engine can use: %s\n' "$reason" >&2
    exit 1
fi
printf '%s\n' "$facts"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1)
driver=${driver:-$(sed -nE 's/^NVRM version:.* ([0-9]+\.[0-9.]+) .*/\1/p' /proc/driver/nvidia/version 2>/dev/null | head -1)}
case $facts in
    *oftware*)
        software=yes
        echo 'This is the software CUDA device, not a GPU: its figures say nothing.'
        ;;
    *) software=no ;;
esac

if [ ! -e "$scratch/all-MiniLM-L6-v2/model.safetensors" ]; then
    mkdir -p "$scratch/all-MiniLM-L6-v2"
    cp minilm/*.json "$scratch/all-MiniLM-L6-v2/"
    gzip -dc minilm/model.safetensors.gz >"$scratch/all-MiniLM-L6-v2/model.safetensors" || exit 1
fi
checkpoints=no
make_checkpoints() {
    [ $checkpoints = yes ] && return
    if ! has numpy; then
        say "not run" "checkpoints" "$python has no numpy"
        failed=1
        return 1
    fi
    step 120 "checkpoints with random weights" "$python" checkpoints.py --out "$scratch" "${models[@]}" && checkpoints=yes
}
sanitize() {
    local tool=$1 seconds=$2 program=$3
    shift 3
    local sanitizer
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    if [ $software = yes ]; then
        say "not run" "compute-sanitizer $tool, $program" "this is no GPU"
    elif [ -z "$sanitizer" ]; then
        say "not run" "compute-sanitizer $tool, $program" "it is not on this machine"
    else
        step "$seconds" "compute-sanitizer $tool, $program" "${ours[@]}" "$sanitizer" --tool "$tool" --error-exitcode 99 \
            --report-api-errors no \
            "bin/$program" --skip software:: "$@"
    fi
}

if [ $section != bench ]; then
    # Everything that is tested without a card rests on these two agreeing.
    step 60 "attention kernels against their host twins" twin
    step 150 "kernel tests" tests cuda_kernels "${kernel_tests[@]}"
    step 150 "engine tests" tests cuda_engine "${engine_tests[@]}"
    if ! has torch || ! has transformers; then
        say "not run" "the engine against transformers" "$python has no torch or no transformers"
    elif make_checkpoints; then
        if step 120 "the oracle: transformers in fp32" "$python" oracle.py "${directories[@]}"; then
            for directory in "${directories[@]}"; do
                step 60 "the engine against transformers, $(basename "$directory")" "${ours[@]}" bin/gpu check "$directory"
            done
        fi
    fi
    sanitize memcheck 90 cuda_kernels
    sanitize racecheck 90 cuda_kernels
    sanitize memcheck 90 cuda_engine every_head
fi

if [ $section != test ] && make_checkpoints; then
    rm -f "$raw"/*
    printf 'driver: %s\ndate: %s\ncommit: %s\n' "${driver:-unknown}" "$(date -u +%F)" "$(cat VERSION)" >"$raw/run.txt"
    if step 180 "benchmark" "${ours[@]}" bin/gpu bench "${directories[@]}" --out "$raw" "${bench[@]}"; then
        if [ "$software" = yes ]; then
            say "not run" "PyTorch and ONNX Runtime" "this is no GPU"
        else
            left=$((limit - SECONDS - 20))
            [ $left -gt 260 ] && left=260
            step 280 "PyTorch and ONNX Runtime" "$python" rivals.py "${directories[@]}" --out "$raw/rivals.csv" \
                --facts "$raw/rivals.json" --deadline "$left" "${rivals[@]}"
        fi
        step 30 "table" "$python" table.py --figures "$raw" --out "$results"
    fi
fi

printf '\n==== Summary ====\n'
printf '%s\n' "${summary[@]}"
[ $failed = 0 ] || echo 'Not all is well: see FAILED and not run above.'
exit $failed
