# zdp-bench for CPUs: docker build -t zdp-bench . && docker run --rm -v "$PWD/results:/work/results" zdp-bench run recipe=quickstart
FROM python:3.11-slim
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md ./
COPY zdp_bench ./zdp_bench
COPY conf ./conf
COPY datasets ./datasets
COPY papers ./papers
COPY recipes ./recipes
# The CPU builds of PyTorch have the same versions as the pins, and no CUDA libraries beside them.
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
    '.[medical,audio,kernels,search]'
RUN useradd --create-home zdp && mkdir /work /data && chown zdp /work /data
USER zdp
WORKDIR /work
ENV ZDP_DATA=/data
ENTRYPOINT ["zdp-bench"]
