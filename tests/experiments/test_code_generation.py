"""Sessions with long instructions, whose contexts fill the engines' prefix caches."""

from experiments.prefix.run import CodeRun, CodeSettings, ReplicaChoice, play_code

CHOICES = {
    "affinity": ReplicaChoice(policy="fcfs", affinity=True),
    "lmetric": ReplicaChoice(balance="lmetric"),
}
SETTINGS = CodeSettings(
    profile="llama31-8b-h100-tp1",
    replicas=(4,),
    rates_per_s=(9.5,),
    choices=CHOICES,
    requests=1_500,
    seeds=(30,),
)


def test_affinity_finds_as_much_in_the_caches_as_a_rule_that_knows_them_exactly() -> None:
    ours, best = (play_code(CodeRun(SETTINGS, CHOICES[name], 4, 9.5, 30)) for name in CHOICES)
    assert ours.hit_ratio > best.hit_ratio - 0.03
    assert ours.ttft_mean_s < 1.25 * best.ttft_mean_s
    assert ours.tpot_mean_s < 1.1 * best.tpot_mean_s
