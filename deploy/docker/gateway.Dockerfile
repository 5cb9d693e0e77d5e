# Daemon and gateway: docker build -f deploy/docker/gateway.Dockerfile -t batchrun-gateway .
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY batchrun batchrun
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG EXTRAS=postgres,s3
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home batchrun \
 && install --directory --owner batchrun --mode 700 /var/lib/batchrun
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]"
ENV BATCHRUN_HOME=/var/lib/batchrun BATCHRUN_CONFIG=/etc/batchrun/batchrun.yaml
USER batchrun
WORKDIR /home/batchrun
VOLUME /var/lib/batchrun
EXPOSE 8000
# The gateway is a process of its own, which tini reaps.
ENTRYPOINT ["tini", "--", "batchrun"]
CMD ["up", "--with-gateway"]
