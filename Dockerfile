# Not built or run by us so far. From the root of a checkout:
#
#   docker build -t kha-megatron .
#
# The image contains PyTorch, Transformer Engine and Python 3.12. Its /etc/pip/constraint.txt keeps
# pip from replacing them.
FROM nvcr.io/nvidia/pytorch:25.12-py3

WORKDIR /opt/kha-megatron
COPY pyproject.toml README.md LICENSE ./
COPY kha_megatron kha_megatron
RUN pip install --no-cache-dir '.[megatron,launch,plots]'
