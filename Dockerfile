# Not built or run by us so far. From the root of a checkout:
#
#   docker build --tag kha-megatron .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 kha-megatron kha-megatron doctor
#
# The image is the one of Megatron-Core 0.19's own CI. It contains PyTorch, Transformer Engine and
# Python 3.12, which satisfy our requirements, so pip keeps them. Its PIP_CONSTRAINT holds other
# packages at older versions, so we clear it, as Megatron does.
FROM nvcr.io/nvidia/pytorch:26.06-py3

ENV PIP_CONSTRAINT=""
WORKDIR /opt/kha-megatron
COPY pyproject.toml README.md LICENSE ./
COPY kha_megatron kha_megatron
RUN pip install --no-cache-dir '.[megatron,launch,plots]'
