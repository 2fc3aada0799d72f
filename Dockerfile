# zdp-bench for CPUs: docker build -t zdp-bench . && docker run --rm -v "$PWD/results:/experiment/results" zdp-bench run recipe=quickstart
# By tag: to pin the base image, put the digest that `docker buildx imagetools inspect` prints here.
FROM python:3.11-slim
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
