# COAT-FLUX with CUDA: `docker build -t coat-flux .`, then, in a folder with photos and a YAML,
#
#   alias coat='docker run --rm --gpus all --user "$(id -u):$(id -g)" -e HF_TOKEN -v coat-cache:/home/coat/.cache -v "$PWD":/work coat-flux'
#   coat examples                                # ready-made configs and example photos, into this folder
#   coat check configs/flux_clothing_coat.yaml
#   coat train configs/flux_clothing_coat.yaml   # HF_TOKEN: a token of an account that has accepted FLUX.1-dev's licence
# CUDA 13: cuBLAS multiplies FP8 with a scale per row on Hopper from 12.9 on
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

FROM ${BASE} AS wheel
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /src
COPY setup.py pyproject.toml README.md LICENSE ./
COPY coat_core coat_core
COPY extensions extensions
COPY configs configs
COPY datasets_example datasets_example
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${BASE}
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# a compiler and Python.h: Triton builds a launcher for each kernel at the first step
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /dist /dist
# torch stays the base image's: pip is held to it
RUN python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > /tmp/torch.txt \
    && python -m pip install --no-cache-dir --constraint /tmp/torch.txt /dist/*.whl \
    && rm -rf /dist /tmp/torch.txt
# open to any user that --user names: caches and what Triton compiles go below HOME
RUN useradd --create-home --uid 10001 coat \
    && mkdir -p /work /home/coat/.cache \
    && chmod 777 /work /home/coat /home/coat/.cache
ENV HOME=/home/coat USER=coat LOGNAME=coat
USER 10001
WORKDIR /work
ENTRYPOINT ["coat-flux"]
CMD ["doctor"]
