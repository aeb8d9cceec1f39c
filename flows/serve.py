"""
Both flows served from one process, without a work pool: ``python -m flows.serve``, in the folder of the project.

The deployments ``embed/served`` and ``predict/served`` are there as long as it runs, and its runs are processes below
it. For one machine and for trying out: told to go, it waits for its runs to complete, however long they take, where a
worker (``flows.worker``) hands them back within a minute.
"""

from prefect import serve

from flows.embed import embed
from flows.predict import predict

NAME = "served"
"""Of both deployments."""


def main() -> None:
    """Serve until told to stop (SIGTERM, Ctrl-C)."""
    serve(embed.to_deployment(NAME), predict.to_deployment(NAME))  # type: ignore[arg-type]  # no loop runs here


if __name__ == "__main__":
    main()
