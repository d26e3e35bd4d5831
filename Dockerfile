# finch with the recipes, the evaluation and reports, for jobs in containers: docker build -t finch .
# No container engine was at hand when this was written: its pip commands have run in an empty environment, the build has not.
FROM python:3.11-slim

# Where torch comes from: PyPI has a build for CUDA, https://download.pytorch.org/whl/cpu one without.
ARG TORCH_INDEX=https://pypi.org/simple

# compile=True builds kernels when it runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/finch
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY finch finch
COPY recipes recipes
COPY configs configs
COPY slurm slurm
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt '.[torchtune,evaluate,report]'

# As any user, with the folder of the job mounted: docker run --gpus all -v "$PWD:$PWD" -w "$PWD" finch run auto ...
WORKDIR /work
ENTRYPOINT ["finch"]
