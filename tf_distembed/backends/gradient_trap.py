"""The variable whose gradient is the update of tables on SparseCores.

`TPUEmbeddingV2` updates its tables by an operation on the gradient of what
they looked up. That operation must run when the gradient of the layer's
trainable variables is computed, so the layer has one such variable for a
gradient to be asked of. It has no meaning of its own.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_distembed.table_variable import optimizer_calls


class GradientTrap(keras.Variable):
    """A scalar that ignores what an optimizer assigns to it.

    Args:
        layer_name: What errors call the layer it belongs to.
        trainable: Whether any table of the layer is.
    """

    def __init__(self, layer_name: str, trainable: bool) -> None:
        self.layer_name = layer_name
        super().__init__(
            lambda shape, dtype: tf.zeros(shape, dtype),
            shape=(),
            dtype="float32",
            trainable=trainable,
            autocast=False,
            name="gradient_trap",
        )

    @property
    def overwrite_with_gradient(self) -> bool:
        """True; raises for an optimizer whose gradients are not the loss's.

        The tables have been updated, or will be, with the gradient as it is.
        """
        for optimizer, _ in optimizer_calls():
            scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            for what, value in (
                ("a dynamic loss scale", scaled),
                ("loss_scale_factor", optimizer.loss_scale_factor),
                ("use_ema", optimizer.use_ema),
                (
                    "gradient_accumulation_steps",
                    optimizer.gradient_accumulation_steps,
                ),
            ):
                if value:
                    raise ValueError(
                        f"Layer '{self.layer_name}' has tables with placement "
                        "'sparsecore', which are updated when the gradient is "
                        f"computed. The optimizer '{optimizer.name}' has "
                        f"{what}, which cannot reach them. Turn it off; with "
                        "16-bit floats use mixed_bfloat16."
                    )
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        """Ignored: Keras resets it when it adopts a variable."""

    @tf.autograph.experimental.do_not_convert
    def assign(self, value: Any) -> Any:
        """Sets the value, unless an optimizer does."""
        if any(optimizer_calls()):
            return self.value
        return super().assign(value)
