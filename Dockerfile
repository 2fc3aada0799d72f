# zdp-bench for CPUs: docker build -t zdp-bench . && docker run --rm -v "$PWD/results:/experiment/results" zdp-bench run recipe=quickstart
FROM python:3.11-slim
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md ./
COPY zdp_bench ./zdp_bench
COPY conf ./conf
COPY datasets ./datasets
COPY papers ./papers
COPY recipes ./recipes
# --build-arg TORCH_INDEX=URL, the index of PyTorch's CPU builds, saves the CUDA libraries (4 GB).
ARG TORCH_INDEX
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} \
    '.[medical,audio,search]'
RUN useradd --create-home zdp && mkdir /experiment /data && chown zdp /experiment /data
USER zdp
WORKDIR /experiment
ENV ZDP_DATA=/data
ENTRYPOINT ["zdp-bench"]
