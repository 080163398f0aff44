#!/usr/bin/env bash
# The served tests against NVIDIA's own container: scripts/test_container.sh IMAGE BACKENDS PYTHON
# Needs Docker, and ports 8000 to 8002 (HTTP_PORT, GRPC_PORT, METRICS_PORT) free. This project's CI has no Docker
# daemon: it does not run there. Tests that start servers of their own are skipped, as they need the binary.
set -euo pipefail

image=$1
[ -n "$image" ] || { echo "give IMAGE=nvcr.io/nvidia/tritonserver:<yy.mm>-py3" >&2; exit 1; }
backends=$(realpath "$2")
python=$3
http=${HTTP_PORT:-8000} grpc=${GRPC_PORT:-8001} metrics=${METRICS_PORT:-8002}
cd "$(dirname "$0")/.."
command -v docker >/dev/null || { echo "docker is not installed" >&2; exit 1; }

models=$PWD/build/container_models
name=triton-rust-test-$$
"$python" tests/served/repository.py "$models"

trap 'docker rm --force "$name" >/dev/null 2>&1 || true' EXIT
docker run --detach --name "$name" --network host \
    --volume "$backends/rust:/opt/tritonserver/backends/rust:ro" --volume "$models:/models:ro" "$image" \
    tritonserver --model-repository=/models --exit-on-error=false \
    --http-port="$http" --grpc-port="$grpc" --metrics-port="$metrics" >/dev/null

printf 'Waiting for the container'
for _ in $(seq 300); do
    if curl --silent --fail "http://127.0.0.1:$http/v2/health/live"; then break; fi
    if [ -z "$(docker ps --quiet --filter "name=$name")" ]; then break; fi
    printf .
    sleep 1
done
printf '\n'
if ! curl --silent --fail "http://127.0.0.1:$http/v2/health/live"; then
    docker logs --tail 50 "$name" >&2
    exit 1
fi

export TRITON_TEST_HTTP=127.0.0.1:$http TRITON_TEST_GRPC=127.0.0.1:$grpc TRITON_TEST_METRICS=127.0.0.1:$metrics
"$python" -m pytest -q tests/served
