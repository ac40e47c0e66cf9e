# rft on NVIDIA cards. Written where no image can be built: nobody has built it yet. Its RUN lines are commands of docs/install.md.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive CUDA_HOME=/usr/local/cuda
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3.12-dev python3.12-venv
WORKDIR /rft
COPY Makefile pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY hydra_plugins hydra_plugins
COPY configs configs
COPY launch launch
COPY rft rft
RUN make setup DEVICE=cuda
ENV PATH=/rft/.venv/bin:$PATH
