# finch with the recipes, the evaluation and reports, for jobs in containers: docker build -t finch .
# No container engine was at hand when this was written: its pip commands have run in an empty environment, the build has not.
FROM python:3.11-slim

# The build of torch; https://download.pytorch.org/whl/cpu for machines without a GPU.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu128

WORKDIR /opt/finch
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY finch finch
COPY recipes recipes
COPY configs configs
COPY slurm slurm
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt '.[torchtune,evaluate,report]'

# As any user, with the folder of the job mounted: docker run --gpus all -v "$PWD:$PWD" -w "$PWD" finch run --config auto ...
WORKDIR /work
ENTRYPOINT ["finch"]
