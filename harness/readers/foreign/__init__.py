"""Curves that other tools wrote, one module per format.

::

    registry.py        FORMATS: finds the format of a path, and reads it
    format.py          Format: its name, how to recognise it and how to read it
    trainer_state.py   Hugging Face's trainer_state.json
    tensorboard.py     TensorBoard's event files; crc32c.py: their checksums
    wandb.py           Weights & Biases offline runs
    golden_values.py   golden values of Megatron-LM
    jsonl.py, csv_table.py, loss_text.py    a row per step
    in_memory.py       columns in memory
    console.py         torchtitan's console log
    megatron_console.py    Megatron-LM's console log
    mllog.py           logs of MLPerf Training
    rcp_tables.py      MLPerf's tables of reference convergence points (not curves)
    names.py           the names of our signals in other tools
    rows.py            collects rows of named values as evidence
    printed_digits.py  how many digits a source prints
"""
