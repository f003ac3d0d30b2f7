"""PPO of language models: everything that trains such a policy, from prompts to updates.

`build` puts a run together, in order. `data` has prompts, `models` loads and saves, `sampling` draws responses in the
trainer's process and `servers` with inference servers, `turns` holds conversations with tools, `rewards` scores,
`learning` computes losses and gradients.
"""
