FROM nvcr.io/nvidia/tritonserver:24.10-py3
COPY build/backends/rust /opt/tritonserver/backends/rust
