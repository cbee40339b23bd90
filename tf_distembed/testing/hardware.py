"""The hardware that the emulator pretends to: one host with chips.

TPUStrategy learns of its hardware through two objects: a resolver, which it
asks for the devices and their kind, and a device assignment, which says on
which device each replica runs.
"""

import collections

import tensorflow as tf

from tf_distembed.testing.private_tensorflow import TPUHardwareFeature

_TASK = "/job:localhost/replica:0/task:0"

_DeviceName = collections.namedtuple("_DeviceName", "name")


class EmulatedResolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """Describes one host with `num_chips` one-core chips."""

    def __init__(self, num_chips: int, sparsecores_per_chip: int) -> None:
        # Not the base class': it would look for a TPU worker.
        self._num_chips = num_chips
        self._hardware = TPUHardwareFeature(
            embedding_feature=TPUHardwareFeature.V2,
            num_embedding_devices_per_chip=sparsecores_per_chip,
        )

    def get_tpu_system_metadata(self) -> tf.tpu.experimental.TPUSystemMetadata:
        """What a TPU system answers when it is asked for its devices."""
        devices = [
            _DeviceName(f"{_TASK}/device:TPU:{chip}")
            for chip in range(self._num_chips)
        ]
        return tf.tpu.experimental.TPUSystemMetadata(
            num_cores=self._num_chips,
            num_hosts=1,
            num_of_cores_per_host=self._num_chips,
            topology=None,
            devices=devices,
        )

    @property
    def tpu_hardware_feature(self) -> TPUHardwareFeature:
        """The kind of hardware: SparseCores, and how many a chip has."""
        return self._hardware

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """This process alone."""
        return tf.train.ClusterSpec({})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """This process."""
        return ""


class EmulatedDeviceAssignment(tf.tpu.experimental.DeviceAssignment):
    """Replica `i` on chip `i`; chip `i` is the logical CPU `i`."""

    def __init__(self, num_chips: int) -> None:
        coordinates = [[chip, 0, 0, 0] for chip in range(num_chips)]
        topology = tf.tpu.experimental.Topology(
            mesh_shape=[num_chips, 1, 1, 1], device_coordinates=[coordinates]
        )
        super().__init__(topology, [[place] for place in coordinates])

    def tpu_device(
        self,
        replica: int = 0,
        logical_core: int = 0,
        job: str | None = None,
    ) -> str:
        """The device that stands for the chip of a replica."""
        return f"{_TASK}/device:CPU:{replica}"

    def host_device(
        self,
        replica: int = 0,
        logical_core: int = 0,
        job: str | None = None,
    ) -> str:
        """The one host of all chips."""
        return f"{_TASK}/device:CPU:0"
