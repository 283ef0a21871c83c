"""Facts about accelerators from their data sheets, without torch: operations per second, memory and its speed.

In: the name of a device, as its driver or as people write it. Out: its peak, or an Accelerator; None if unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

TF32_SHARE = 0.5  # of the operations in bf16: A100 to B200 and the GeForce cards (NVIDIA's data sheets above)
PEAK_TERAFLOPS: dict[str, tuple[float, float | None, float | None]] = {
    # device: (fp32, fp16, bf16)                                        source
    "P100 SXM2": (10.6, 21.2, None),  # NVIDIA Tesla P100 data sheet; without tensor cores
    "P100 PCIE": (9.3, 18.7, None),
    "V100 SXM2": (15.7, 125, None),  # NVIDIA V100 data sheet (2020)
    "V100 PCIE": (14.0, 112, None),
    "V100S PCIE": (16.4, 130, None),
    "T4": (8.1, 65, None),  # NVIDIA T4 data sheet
    "RTX 2080 TI": (13.4, 53.8, None),  # NVIDIA Turing architecture white paper, table 4, with fp32 accumulation
    "QUADRO RTX 6000": (16.3, 130.5, None),  # NVIDIA Turing architecture white paper, table 5
    "QUADRO RTX 8000": (16.3, 130.5, None),
    "A100 SXM4": (19.5, 312, 312),  # NVIDIA A100 data sheet
    "A100 PCIE": (19.5, 312, 312),
    "A30": (10.3, 165, 165),  # NVIDIA A30 data sheet
    "A10": (31.2, 125, 125),  # NVIDIA A10 data sheet
    "A10G": (35, 70, 70),  # NVIDIA A10G data sheet (as AWS offers it)
    "A40": (37.4, 149.7, 149.7),  # NVIDIA A40 data sheet
    "RTX A6000": (38.7, 154.8, 154.8),  # NVIDIA RTX A6000 data sheet
    "RTX 3090": (35.6, 71, 71),  # NVIDIA GA102 white paper, with fp32 accumulation
    "L4": (30.3, 121, 121),  # NVIDIA L4 data sheet
    "L40": (90.5, 181, 181),  # NVIDIA L40 data sheet
    "L40S": (91.6, 362, 362),  # NVIDIA L40S data sheet
    "RTX 6000 ADA GENERATION": (91.1, 364.2, 364.2),  # NVIDIA AD102 white paper
    "RTX 4090": (82.6, 165.2, 165.2),  # NVIDIA AD102 white paper, with fp32 accumulation
    "RTX 5090": (104.8, 209.5, 209.5),  # NVIDIA RTX Blackwell architecture white paper, with fp32 accumulation
    "H100": (66.9, 989.4, 989.4),  # NVIDIA H100 white paper: the SXM5 board; its name gives no form
    "H100 PCIE": (51.2, 756, 756),
    "H100 NVL": (60, 835, 835),  # NVIDIA H100 data sheet
    "H200": (66.9, 989.4, 989.4),  # NVIDIA H200 data sheet: the SXM5 board
    "H200 NVL": (60, 836, 836),
    "GH200": (66.9, 989.4, 989.4),  # NVIDIA GH200 data sheet
    "B200": (75, 2250, 2250),  # NVIDIA HGX B200: an eighth of the board's
}
"""Dense peaks in 10^12 operations per second: fp32 without tensor cores, 16-bit products with them. Data sheets often
state the value with structured sparsity, which is twice as high. None: not supported by the device."""
VENDORS = {"NVIDIA", "TESLA", "GEFORCE"}
MEMORY_SIZE = re.compile(r"(\d+)GB?|HBM\d\w*")
SAME_SIZE = 0.1  # a driver reports up to this share less memory than the size in the name


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device and how several of it are usually connected.

    Args:
        peak_name: its name in PEAK_TERAFLOPS.
        memory_mib: as its driver reports it.
        devices_per_node: of the usual node.
        gigabytes_per_second: peak of its memory; None if unknown.
    """

    peak_name: str
    memory_mib: int
    devices_per_node: int
    gigabytes_per_second: int | None = None

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20

    @property
    def is_known(self) -> bool:
        return self.peak_name in PEAK_TERAFLOPS


ACCELERATORS = {
    # peak, MiB, devices of the usual node, which the comment names, GB/s by the data sheets above
    "p100": Accelerator("P100 PCIE", 16280, 4, 732),
    "v100": Accelerator("V100 SXM2", 32768, 8, 900),  # NVIDIA DGX-1
    "v100-16gb": Accelerator("V100 SXM2", 16384, 8, 900),  # NVIDIA DGX-1 with 16 GB
    "t4": Accelerator("T4", 15360, 4, 320),  # AWS g4dn.12xlarge
    "rtx8000": Accelerator("QUADRO RTX 8000", 48601, 4, 672),  # workstation
    "a10": Accelerator("A10", 23028, 8, 600),  # as AWS g5.48xlarge
    "a10g": Accelerator("A10G", 23028, 8, 600),  # AWS g5.48xlarge
    "a40": Accelerator("A40", 46068, 8, 696),
    "a100": Accelerator("A100 SXM4", 81920, 8, 2039),  # NVIDIA DGX A100 80 GB
    "a100-40gb": Accelerator("A100 SXM4", 40960, 8, 1555),  # NVIDIA DGX A100 40 GB
    "l4": Accelerator("L4", 23034, 8, 300),  # AWS g6.48xlarge
    "l40s": Accelerator("L40S", 46068, 8, 864),  # AWS g6e.48xlarge
    "a6000": Accelerator("RTX A6000", 49140, 4, 768),  # workstation
    "rtx3090": Accelerator("RTX 3090", 24576, 4, 936),  # workstation
    "rtx4090": Accelerator("RTX 4090", 24564, 4, 1008),  # workstation
    "rtx5090": Accelerator("RTX 5090", 32607, 4, 1792),  # workstation
    "h100": Accelerator("H100", 81559, 8, 3350),  # NVIDIA DGX H100
    "h200": Accelerator("H200", 143771, 8, 4800),  # NVIDIA DGX H200
    "b200": Accelerator("B200", 183359, 8, 8000),  # NVIDIA DGX B200
}
"""By the names that `fivetune estimate` knows. T4: NVIDIA's product brief, other documents say 300 GB/s."""
USUAL_NODE = 8  # devices of a node, of accelerators that are not in the table


def find_peak_flops(name: str, precision: str) -> float | None:
    """Find the peak dense operations per second of a device; None if unknown.

    The words of the name, without vendor and memory size, must match PEAK_TERAFLOPS exactly: a laptop version, a MIG
    instance or another form factor is another device.

    Args:
        name: the driver's name of the device.
        precision: fp32, tf32, fp16 or bf16.

    >>> find_peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), find_peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    (312000000000000.0, 989400000000000.0)
    >>> find_peak_flops("NVIDIA A100-SXM4-80GB", "tf32")
    156000000000000.0
    >>> find_peak_flops("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16"), find_peak_flops("Tesla T4", "bf16")
    (None, None)
    """
    fp32, fp16, bf16 = PEAK_TERAFLOPS.get(_normalize_name(name), (None, None, None))
    tf32 = None if bf16 is None else TF32_SHARE * bf16
    peak = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}[precision]
    return None if peak is None else peak * 1e12


def _normalize_name(name: str) -> str:
    """The words of a device's name without vendor and memory size."""
    words: list[str] = []
    for word in re.split(r"[\s-]+", name.upper()):
        if word not in VENDORS and not MEMORY_SIZE.fullmatch(word):
            words.append(word)
    return " ".join(words)


def find_accelerator(name: str, memory_mib: int | None = None) -> Accelerator | None:
    """Find an accelerator by a short name, or by the driver's name of a device.

    Args:
        memory_mib: as the driver reports it; default: the size in the name, if it has one.

    Returns: None if it is not in the tables, unless `memory_mib` says its memory.

    >>> find_accelerator("NVIDIA H100 80GB HBM3") == find_accelerator("h100"), find_accelerator("gpu") is None
    (True, True)
    >>> find_accelerator("NVIDIA A100-SXM4-40GB") == find_accelerator("a100-40gb")
    True
    >>> find_accelerator("RTX 4090") == find_accelerator("NVIDIA GeForce RTX 4090") == find_accelerator("rtx4090")
    True
    >>> find_accelerator("gpu", 16384)
    Accelerator(peak_name='GPU', memory_mib=16384, devices_per_node=8, gigabytes_per_second=None)
    """
    peak_name = _normalize_name(name)
    short = re.sub(r"[\s-]+", "", name.lower())
    alike = [found for key, found in ACCELERATORS.items() if key.replace("-", "") == short]
    if not alike:
        alike = [found for found in ACCELERATORS.values() if found.peak_name == peak_name]
    size = memory_mib or _read_memory_mib(name)
    if not alike:
        is_known = memory_mib or peak_name in PEAK_TERAFLOPS
        return Accelerator(peak_name, size, USUAL_NODE) if size and is_known else None
    if size is None:
        return alike[0]
    closest = min(alike, key=lambda found: abs(found.memory_mib - size))
    # a size in the name is rounded, so that the table knows better
    if memory_mib is None and abs(closest.memory_mib - size) <= SAME_SIZE * size:
        return closest
    return replace(closest, memory_mib=size)


def describe_accelerator(name: str, memory_mib: int | None = None) -> str:
    """Describe what the data sheet of a device says, for people; empty if it is unknown.

    >>> describe_accelerator("Tesla T4")
    'dense peaks 8.1 TFLOP/s in fp32, 65 in fp16, no bf16; 320 GB/s'
    """
    found = find_accelerator(name, memory_mib)
    if found is None or not found.is_known:
        return ""
    fp32, fp16, bf16 = PEAK_TERAFLOPS[found.peak_name]
    others = [
        f"no {kind}" if peak is None else f"{peak:g} in {kind}" for kind, peak in (("fp16", fp16), ("bf16", bf16))
    ]
    speed = f"; {found.gigabytes_per_second:,} GB/s" if found.gigabytes_per_second else ""
    return f"dense peaks {fp32:g} TFLOP/s in fp32, {', '.join(others)}{speed}"


def _read_memory_mib(name: str) -> int | None:
    """The size of the memory in a device's name."""
    for word in re.split(r"[\s-]+", name.upper()):
        found = MEMORY_SIZE.fullmatch(word)
        if found and found[1]:  # HBM3 has no size
            return 1024 * int(found[1])
    return None
