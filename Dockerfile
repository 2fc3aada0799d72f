# zdp-bench for CPUs: docker build -t zdp-bench . && docker run --rm -v "$PWD/results:/experiment/results" zdp-bench run recipe=quickstart
# Python 3.11.16 on Debian trixie, for amd64 and arm64. A newer digest is printed by
# docker buildx imagetools inspect python:3.11-slim
FROM python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
WORKDIR /src
COPY pyproject.toml constraints.txt requirements-torch.txt requirements-image.txt ./
# Every package by its hashes. --build-arg TORCH_INDEX=URL, the index of PyTorch's CPU builds, whose
# hashes differ, saves the CUDA libraries (4 GB).
ARG TORCH_INDEX
RUN if [ -n "$TORCH_INDEX" ]; then \
      pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" torch torchvision; \
    else \
      pip install --no-cache-dir --no-deps --require-hashes -r requirements-torch.txt; \
    fi
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements-image.txt
COPY README.md LICENSE CHANGELOG.md ./
COPY zdp_bench ./zdp_bench
COPY conf ./conf
COPY datasets ./datasets
COPY papers ./papers
COPY recipes ./recipes
RUN pip install --no-cache-dir --no-deps .
RUN useradd --create-home zdp && mkdir /experiment /data && chown zdp /experiment /data
USER zdp
WORKDIR /experiment
ENV ZDP_DATA=/data
ENTRYPOINT ["zdp-bench"]
