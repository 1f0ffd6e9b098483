# The planning service: REST on port 8000, as a user without rights, without torch.
# docker build -t meshwright . && docker run --rm -p 8000:8000 meshwright

FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN python -m venv /opt/meshwright \
    && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && /opt/meshwright/bin/pip install --no-cache-dir --constraint constraints.txt /wheels/*.whl

FROM python:3.12-slim
LABEL org.opencontainers.image.title="meshwright" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin meshwright
COPY --from=build /opt/meshwright /opt/meshwright
ENV PATH=/opt/meshwright/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /tmp
EXPOSE 8000
# urlopen raises on refused connections and on any status from 400 up.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
CMD ["meshwright", "serve", "--host", "0.0.0.0", "--port", "8000"]
