# ppma on a CPU. Two stages: the compiler stays in the first.
FROM python:3.11-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/ppma
ENV PATH=/opt/ppma/bin:$PATH
# torch and torchvision from one index: PyPI's torchvision does not fit a torch without CUDA.
RUN pip install --no-cache-dir torch==2.15.0 torchvision==0.29.2 --index-url https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY src ./src
# hadolint ignore=DL3013
RUN PPMA_REQUIRE_NATIVE=1 pip install --no-cache-dir --constraint constraints.txt ".[train,export]"

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/ppma /opt/ppma
ENV PATH=/opt/ppma/bin:$PATH
RUN useradd --uid 1000 --create-home ppma
USER 1000
WORKDIR /data
ENTRYPOINT ["ppma"]
CMD ["doctor"]
