"""``virnucpro predict`` in the folder of the outputs, where a run that was stopped resumes."""

from pathlib import Path

from snakemake.shell import shell

folders = {str(Path(path).parent) for path in snakemake.output}  # noqa: F821  the wrapper's own variable
if len(folders) != 1:
    raise ValueError(f"the outputs lie in {len(folders)} folders: a run of VirNucPro has one")
(folder,) = folders
extra = snakemake.params.get("extra", "")  # noqa: F821
log = snakemake.log_fmt_shell(stdout=True, stderr=True)  # noqa: F821
shell("virnucpro predict {snakemake.input:q} --output {folder:q} --workers {snakemake.threads} {extra} {log}")
