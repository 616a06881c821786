"""The student and its critic as one module, so that one wrapper, one optimiser and one checkpoint hold both.

A forward pass takes a pack and gives, at every sampled token, the student's last hidden state and the critic's value of
the state that token was sampled in. Logits are never made here: the losses project hidden states in chunks.

Axes: A = sampled tokens of a pack, H = hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memopd_train.alignpack import Pack
from memopd_train.attention import Backend, hidden_states, output_head, use_backend
from memopd_train.errors import VocabularyError
from memopd_train.loading import load_model
from memopd_train.projection import Projection
from memopd_train.weights import align


class Critic(nn.Module):
    """A backbone and a scalar head that starts at zero; without a backbone, a head on the student's trunk.

    Args:
        width: H of the hidden states it reads.
        backbone: A decoder of its own, or None to read the student's hidden states (and train them).
    """

    def __init__(self, width: int, backbone: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def copy_of(cls, student: PreTrainedModel) -> Critic:
        """A critic whose backbone starts as a copy of the student's."""
        return cls.on(copy.deepcopy(student.get_decoder()))

    @classmethod
    def on(cls, backbone: PreTrainedModel) -> Critic:
        """A critic on a given decoder, which it takes over."""
        backbone.requires_grad_(True)
        return cls(backbone.config.get_text_config().hidden_size, backbone)


class ActorCritic(nn.Module):
    """The student and its critic.

    Args:
        actor: The student, a causal language model.
        critic: Its critic.
        backend: Attention over packs.
    """

    def __init__(self, actor: PreTrainedModel, critic: Critic, backend: Backend | str = Backend.SDPA) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic
        self.backend = Backend(backend)
        align(self)
        use_backend(actor, self.backend)
        if critic.backbone is not None:
            use_backend(critic.backbone, self.backend)

    @property
    def config(self) -> Any:
        """The student's configuration, for libraries that look for one."""
        return self.actor.config

    def forward(self, pack: Pack, *, actor: bool = True) -> tuple[Tensor | None, Tensor]:
        """Run both over one pack.

        Args:
            pack: The row.
            actor: Let gradients into the student, and run it even if the critic does not need it.

        Returns:
            Hidden states (A, H), or None if the student was not run, and values (A,) in float32.
        """
        hidden = None
        if actor or self.critic.backbone is None:
            with torch.set_grad_enabled(actor and torch.is_grad_enabled()):
                hidden = hidden_states(self.actor, pack, self.backend)
        seen = hidden if self.critic.backbone is None else hidden_states(self.critic.backbone, pack, self.backend)
        assert seen is not None
        values = self.critic.head(seen.to(self.critic.head.weight.dtype))[:, 0].float()
        return hidden, values

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Trade computation for memory in both."""
        self.actor.gradient_checkpointing_enable(**kwargs)
        if self.critic.backbone is not None:
            self.critic.backbone.gradient_checkpointing_enable(**kwargs)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the student that train."""
        return (parameter for parameter in self.actor.parameters() if parameter.requires_grad)

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the critic that train."""
        return (parameter for parameter in self.critic.parameters() if parameter.requires_grad)


def project(model: PreTrainedModel, hidden: Tensor) -> Projection:
    """Pair hidden states (A, H) with the head of the model they came from; a sharded head is gathered."""
    weight, bias = output_head(model)
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    if isinstance(bias, DTensor):
        bias = bias.full_tensor()
    return Projection(hidden, weight, bias)


def freeze(model: PreTrainedModel | str | None, backend: Backend | str, device: torch.device) -> PreTrainedModel | None:
    """Make a model, or the path of one, into one that is only asked, never trained: a teacher or a reference."""
    if model is None:
        return None
    loaded = load_model(model, frozen=True) if isinstance(model, str) else model
    align(loaded)
    use_backend(loaded, backend)
    return loaded.requires_grad_(False).eval().to(device)  # pyright: ignore[reportArgumentType]


def valid_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None = None,
    teacher_tokenizer: PreTrainedTokenizerBase | None = None,
) -> int:
    """Check that student and teacher mean the same by every token id, and return how many ids there are.

    Heads may be wider than the tokenizer, and differ in width (151,936 and 152,064 rows of one family): rows beyond the
    tokenizer are padding and get no probability. What must agree is the tokens.

    Args:
        tokenizer: The student's.
        model: The student.
        teacher: The teacher, if there is one.
        teacher_tokenizer: The teacher's; None trusts that it is the student's.

    Raises:
        VocabularyError: Names the first id that differs, or the head that is too narrow.
    """
    size = len(tokenizer)
    for name, asked in (("student", model), ("teacher", teacher)):
        rows = len(output_head(asked)[0]) if asked is not None else size
        if rows < size:
            raise VocabularyError(
                f"the {name}'s head has {rows} rows, the tokenizer {size} ids: token id {rows} "
                f"({tokenizer.convert_ids_to_tokens(int(rows))!r}) is unknown to the {name}; use models of one family"
            )
    if teacher_tokenizer is not None:
        names = {number: token for token, number in teacher_tokenizer.get_vocab().items()}
        for token, number in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
            if names.get(number) != token:
                raise VocabularyError(
                    f"student and teacher disagree on token id {number}: {token!r} for the student, "
                    f"{names.get(number)!r} for the teacher; distillation over the vocabulary needs one tokenizer"
                )
    return size
