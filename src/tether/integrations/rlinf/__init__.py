"""RLinf's YAML, imported: every key is mapped onto a native one, known to do nothing here, or refused by name.

::

    imported = import_file(Path("maniskill_ppo_mlp.yaml"), overrides=[])
    imported.native["algorithm.lam"]  # 0.9
    imported.origins["algorithm.lam"]  # "algorithm.gae_lambda"
    print(report(imported))

`importer` applies the tables (`shared`, `text`, `embodied`: one row a key) to what `loading.compose` and `values` read;
`tether.config.loading.rlinf_marks` says which files are RLinf's.
"""
