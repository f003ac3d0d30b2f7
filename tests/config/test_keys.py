"""The schema as a whole: every key is documented, explained, and cannot be misspelled unnoticed."""

import pytest

from tether.config import ConfigError, explain, explanations, format_inheritance, live_keys, load_config
from tether.config.keys import keys
from tether.config.loading.typos import nearest

SLIPS = {
    "drop": lambda word, at: word[:at] + word[at + 1 :],
    "double": lambda word, at: word[:at] + word[at] + word[at:],
    "swap": lambda word, at: word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :] if at else word + word,
    "replace": lambda word, at: word[:at] + ("q" if word[at] != "q" else "z") + word[at + 1 :],
}


def misspell(path, part, slip):
    """Apply a slip to the middle of one part of a dotted path."""
    parts = path.split(".")
    parts[part] = slip(parts[part], len(parts[part]) // 2)
    return ".".join(parts)


def test_every_misspelled_name_is_traced_to_its_key():
    for slip in SLIPS.values():
        typos = {misspell(path, -1, slip): path for path in keys()}
        traced = {typo: nearest(typo) for typo in typos if typo not in keys() and not typo.endswith(".")}
        assert len(traced) > 0.9 * len(keys())  # all but slips that give another key, or swap equal letters
        assert {typo: (found, typos[typo]) for typo, found in traced.items() if found != typos[typo]} == {}


def test_every_misspelled_section_is_traced_to_its_key():
    typos = {misspell(path, 0, SLIPS["drop"]): path for path in keys()}
    assert {typo: nearest(typo) for typo in typos if nearest(typo) != typos[typo]} == {}


def test_every_misspelled_key_is_rejected():
    typos = [misspell(path, -1, SLIPS["replace"]) for path in keys()]
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"{typo}=1" for typo in typos])
    unknown = {problem.path: problem.fix for problem in error.value.problems if problem.what == "unknown key"}
    assert set(unknown) == set(typos)
    assert unknown["algorithm.lqm"] == "did you mean algorithm.lam?"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("algorithm.gemma", "algorithm.gamma"),
        ("actor_rollout.ref.rollout.n", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size"),
        ("actor_rollout_ref.critic.ppo_epochs", "critic.ppo_epochs"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.train_batch_size", "data.train_batch_size"),
    ],
)
def test_known_misspellings_name_the_real_key(wrong, right):
    with pytest.raises(ConfigError, match=f"{wrong}: unknown key. did you mean {right}\\?"):
        load_config(None, [f"{wrong}=1"])


def test_a_key_like_no_other_is_sent_to_its_section():
    with pytest.raises(ConfigError, match=r"data\.bar: unknown key\. see `tether config explain data`"):
        load_config(None, ["data.bar=1"])


def test_every_key_has_one_line_of_doc_that_is_a_sentence():
    for key in keys().values():
        assert key.doc.endswith((".", ")")), key.path
        assert "\n" not in key.doc, key.path


def test_every_key_is_explained():
    for path, key in keys().items():
        text = explain(path)
        assert text.startswith(path + "\n")
        assert key.doc in text
        assert "\n  takes: " in text
        assert "\n  default: " in text


def test_explain_says_what_a_key_inherits():
    assert explain("critic.enable").splitlines()[-1] == "  default: inherits algorithm.adv_estimator == gae"
    assert "inherits actor_rollout_ref.actor.clip_ratio" in explain("actor_rollout_ref.actor.clip_ratio_low")


def test_explain_lists_names_that_are_read_as_another():
    assert "takes: one of naive, batch, dapo, gdpo, prime, remote\n" in explain("reward_model.reward_manager")


def test_explain_says_what_is_refused_and_what_does_nothing():
    assert "optimal_token_baseline, gdpo, raw or a function of a file" in explain("algorithm.adv_estimator")
    assert "refused: any value but null (tether keeps" in explain("trainer.default_hdfs_dir")
    assert "no effect here: " in explain("actor_rollout_ref.rollout.scheduling_policy")
    assert "acts only while algorithm.use_pf_ppo is True" in explain("algorithm.pf_ppo.weight_pow")
    assert "from this step on, counted from 1" in explain("trainer.critic_warmup")
    assert "second name of: data.chat_template" in explain("actor_rollout_ref.model.custom_chat_template")


def test_an_entry_of_a_free_mapping_is_explained_by_the_mapping():
    assert explain("distillation.teacher_models.math.model_path") == explain("distillation.teacher_models")


def test_explain_lists_a_section():
    text = explain("algorithm.kl_ctrl")
    assert text.count("\n") == 6
    assert "algorithm.kl_ctrl.target_kl" in text


def test_explain_of_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean trainer\.logger\?"):
        explain("trainer.loger")


def test_inheritance_is_one_table():
    lines = dict(line.split("  <- ") for line in format_inheritance().splitlines())
    table = {key.strip(): source for key, source in lines.items()}
    assert table["critic.ppo_epochs"] == "actor_rollout_ref.actor.ppo_epochs"
    assert table["critic.enable"] == "algorithm.adv_estimator == gae"
    assert set(table) == {key.path for key in keys().values() if key.inherits}


def test_marks_point_at_keys():
    for key in keys().values():
        assert key.inherits is None or key.inherits.key in keys()
        assert key.alias_of is None or key.alias_of in keys()


def test_every_switch_is_a_key_that_can_have_such_values():
    for key in keys().values():
        switch = key.acts_if
        while switch is not None:
            choices = set(keys()[switch.key].choices)
            assert not choices or set(switch.on or switch.off or ()) <= {*choices, None}, key.path
            assert (switch.on is None) != (switch.off is None), key.path
            switch = switch.other


def test_refused_names_are_choices_of_their_key():
    for key in keys().values():
        assert key.refuses is None or set(key.refuses.choices) < set(key.choices), key.path


def test_live_keys_are_those_that_can_act():
    live = live_keys()
    assert {"actor_rollout_ref.actor.clip_ratio", "trainer.seed", "algorithm.kl_ctrl.horizon"} <= set(live)
    assert not any("veomni" in path for path in live)
    assert "actor_rollout_ref.actor.ppo_micro_batch_size" not in live


def test_sections_are_listed_and_keys_are_found_by_a_word():
    listed = explanations.list_sections()
    assert "\nalgorithm " in listed
    assert "\nactor_rollout_ref.actor " in listed
    found = explanations.search("Entropy")
    assert found.startswith("actor_rollout_ref.actor.entropy_coeff")
    assert "trainer.save_freq" not in found
    with pytest.raises(ValueError, match="--search xyzzy: no key"):
        explanations.search("xyzzy")
