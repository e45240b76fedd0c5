# millionway in a container: docs/container.md says how it is built and run.
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim-bookworm
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /wheel/*.whl \
    && rm -r /wheel /tmp/constraints.txt \
    && useradd --create-home --uid 1000 millionway
USER 1000
WORKDIR /workspace
ENTRYPOINT ["millionway"]
CMD ["--help"]
