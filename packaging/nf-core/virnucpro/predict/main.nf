process VIRNUCPRO_PREDICT {
    tag "${meta.id}"
    label 'process_medium'

    conda "${moduleDir}/environment.yml"
    container "${workflow.containerEngine in ['singularity', 'apptainer'] && !task.ext.singularity_pull_docker_container
        ? 'https://depot.galaxyproject.org/singularity/virnucpro-light:0.1.0--pyhdfd78af_0'
        : 'quay.io/biocontainers/virnucpro-light:0.1.0--pyhdfd78af_0'}"

    input:
    tuple val(meta), path(sequences, stageAs: "input*/*")

    output:
    tuple val(meta), path("${prefix}/contigs.tsv"), emit: calls
    tuple val(meta), path("${prefix}/viral.fasta"), emit: viral
    tuple val(meta), path("${prefix}/viral_regions.bed"), emit: regions
    tuple val(meta), path("${prefix}/viral_regions.fasta"), emit: region_sequences
    tuple val(meta), path("${prefix}/genes.gff3"), emit: genes_gff
    tuple val(meta), path("${prefix}/genes.faa"), emit: genes_faa
    tuple val(meta), path("${prefix}/report.html"), emit: report
    tuple val(meta), path("${prefix}/virnucpro_mqc.json"), emit: multiqc
    tuple val("${task.process}"), val('virnucpro'), eval("virnucpro --version | sed 's/virnucpro //'"), topic: versions, emit: versions_virnucpro

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    virnucpro \\
        predict \\
        ${sequences} \\
        --output ${prefix} \\
        --workers ${task.cpus} \\
        ${args}
    """

    stub:
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    mkdir ${prefix}
    touch ${prefix}/{contigs.tsv,viral.fasta,viral_regions.{bed,fasta},genes.{gff3,faa},report.html,virnucpro_mqc.json}
    """
}
