"""PPO training of language models, from prompts to weight updates.

`build` puts a run together. `data` reads prompts, `models` loads and saves models, `sampling` samples responses in the
trainer's process and `servers` on inference servers, `turns` runs conversations with tools, `rewards` scores responses,
and `learning` computes losses and gradients.
"""
