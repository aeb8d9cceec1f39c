"""
Serves both flows from one process, without a work pool: ``python -m flows.serve`` in the project's folder.

The deployments ``embed/served`` and ``predict/served`` exist while it runs. For one machine and for trials: at SIGTERM
it waits for its runs to complete, while a worker (``flows.worker``) hands them back within a minute.
"""

from prefect import serve

from flows.embed import embed
from flows.predict import predict
from flows.run.metrics_by_default import serve_by_default

NAME = "served"


def main() -> None:
    serve_by_default()
    serve(embed.to_deployment(NAME), predict.to_deployment(NAME))  # type: ignore[arg-type]  # no loop runs here


if __name__ == "__main__":
    main()
