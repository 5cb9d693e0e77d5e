# An engine with its agent: docker build -f deploy/docker/engine.Dockerfile -t batchrun-engine .
# A node of Ray: --build-arg EXTRAS=gpu,ray, and `docker run --entrypoint ray ... start --block ...`
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY batchrun batchrun
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG EXTRAS=gpu
# gcc: Triton compiles its launchers when the engine starts.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home batchrun \
 && install --directory --owner batchrun --mode 700 /var/lib/batchrun /home/batchrun/.cache
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]"
ENV BATCHRUN_HOME=/var/lib/batchrun
USER batchrun
WORKDIR /home/batchrun
VOLUME ["/var/lib/batchrun", "/home/batchrun/.cache"]
EXPOSE 8100
ENTRYPOINT ["tini", "--", "batchrun"]
CMD ["engine", "serve", "--help"]
