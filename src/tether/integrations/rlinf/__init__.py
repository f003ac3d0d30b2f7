"""Imports RLinf's YAML files: each key is mapped to native keys, known to have no effect here, or refused by name.

::

    imported = import_file(Path("maniskill_ppo_mlp.yaml"), overrides=[])
    imported.native["algorithm.lam"]  # 0.9
    imported.origins["algorithm.lam"]  # "algorithm.gae_lambda"
    print(report(imported))

`importer` applies the tables (`shared`, `text`, `embodied`, with one row per key) to the values that `loading.compose`
and `values` read. `tether.config.loading.rlinf_marks` recognises RLinf's files.
"""
