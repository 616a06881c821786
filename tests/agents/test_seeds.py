from __future__ import annotations

import numpy as np

from memopd_agents.seeds import derive_seed, episode_seed


def test_seeds_are_the_same_in_every_process_and_tell_parts_apart():
    assert derive_seed(3, 1, 2) == 7012983663664947944
    assert derive_seed(np.int64(3), 1, 2) == derive_seed(3, 1, 2)
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed(1, "23"), derive_seed(1, 2, 3)}) == 4


def test_episode_seed_is_accepted_by_gymnasium():
    assert all(0 <= episode_seed(0, number) < 2**32 for number in range(100))
