"""Curves that other tools wrote, each format in a module.

::

    registry.py        FORMATS: which format a path is in, and reading it
    format.py          what a format is to the registry: its name, how to recognise and read it
    trainer_state.py   Hugging Face's trainer_state.json
    tensorboard.py     TensorBoard's event files; crc32c.py: their checksums
    wandb.py           Weights & Biases offline runs
    golden_values.py   golden values of Megatron-LM
    jsonl.py, csv_table.py, loss_text.py    a row per step
    in_memory.py       columns that a program holds in memory
    console.py         torchtitan's console log
    mllog.py           logs of MLPerf Training
    rcp_tables.py      MLPerf's tables of reference convergence points, which are no curves
    names.py           what other tools call our signals
    rows.py            rows of named values to evidence
    printed_digits.py  how coarsely a source prints a signal
"""
