"""GPU profiles: the shipped ones against datasheets, a user's own against the messages that guide it."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import costmodel.profiles
from costmodel.profiles import COMPUTE_FORMATS, GPU, ProfileError, gpu, gpus
from npinfer.errors import InputError, UnknownName

FILE = Path(costmodel.profiles.__file__).with_name("gpus.toml")
TABLES = tomllib.loads(FILE.read_text(encoding="utf-8"))
PROFILES = [gpu(name) for name in gpus()]
MINIMAL = "memory_bytes = 24e9\nmemory_bytes_per_s = 1008e9\n"
SIZES = {"rtx-4060-ti": [8, 16], "v100-sxm2": [16, 32], "apple-m2-ultra-76-core-gpu": [64, 128, 192]}


def write(folder, text, name="my-gpu.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def error(folder, text):
    """The message that the profile `text` is refused with."""
    with pytest.raises(ProfileError) as caught:
        gpu(write(folder, text))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder / 'my-gpu.toml'}: ")
    return message


# ---- the shipped profiles


def test_125_devices():
    assert len(TABLES) == 125


# Typed from the datasheets, one direction for the links.
@pytest.mark.parametrize(
    "name, key, value",
    [
        ("rtx-4090", "memory_bytes", 24_000_000_000),
        ("rtx-4090", "memory_bytes_per_s", 1008e9),
        ("rtx-4090", "fp16", 165.2e12),
        ("rtx-4090", "fp16-fp16acc", 330.3e12),
        ("rtx-4090", "last_level_cache_bytes", 72_000_000),
        ("a100-sxm-80gb", "memory_bytes_per_s", 2039e9),
        ("a100-sxm-80gb", "fp16", 312e12),
        ("a100-sxm-80gb", "int8", 624e12),
        ("a100-sxm-80gb", "host_link_bytes_per_s", 31.5e9),
        ("h100-sxm", "memory_bytes_per_s", 3350e9),
        ("h100-sxm", "bf16", 989.4e12),
        ("h100-sxm", "fp8", 1978.9e12),
        ("h100-sxm", "interconnect_bytes_per_s", 450e9),  # 900 GB/s both ways
        ("h100-sxm", "host_link_bytes_per_s", 63e9),
        ("b200", "fp4", 9000e12),
        ("t4", "int8", 130e12),
        ("rtx-4060-ti", "host_link_bytes_per_s", 15.75e9),  # PCIe 4.0, but 8 lanes
        ("instinct-mi300x", "last_level_cache_bytes", 256_000_000),  # Infinity Cache, not the 32 MB of L2
        ("instinct-mi300x", "interconnect_bytes_per_s", 448e9),  # 7 links of 64 GB/s
        ("radeon-rx-7900-xtx", "last_level_cache_bytes", 96_000_000),
        ("arc-a770-16gb", "memory_bytes_per_s", 560e9),
        ("apple-m2-ultra-76-core-gpu", "memory_bytes_per_s", 800e9),
    ],
)
def test_datasheet_anchor(name, key, value):
    profile = gpu(name)
    assert (profile.matmul_flops_per_s[key] if key in COMPUTE_FORMATS else getattr(profile, key)) == value


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_profile_is_whole(profile):
    assert profile.source
    assert profile.vendor in ("NVIDIA", "AMD", "Intel", "Apple")
    assert profile.architecture and profile.memory_kind
    assert bool(profile.host_link) == (profile.host_link_bytes_per_s is not None)
    assert bool(profile.interconnect) == (profile.interconnect_bytes_per_s is not None)
    assert profile.confidence in ("", "low")
    assert list(profile.matmul_flops_per_s) == [f for f in COMPUTE_FORMATS if f in profile.matmul_flops_per_s]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_numbers_are_in_the_range_of_real_devices(profile):
    """A slip by a factor of 1000, or a bidirectional link, would fall outside."""
    assert 6e9 <= profile.memory_bytes <= 512e9
    assert 60e9 <= profile.memory_bytes_per_s <= 8e12
    assert all(2e12 <= rate <= 10e15 for rate in profile.matmul_flops_per_s.values())
    assert 2e12 <= (profile.vector_flops_per_s or 2e12) <= 170e12
    assert 1e6 <= (profile.last_level_cache_bytes or 1e6) <= 256e6
    assert 16e9 <= (profile.interconnect_bytes_per_s or 16e9) <= 900e9
    if profile.host_link:
        generation, lanes = re.fullmatch(r"PCIe (\d)\.0 x(\d+)", profile.host_link).groups()
        per_lane = {"3": 8e9, "4": 16e9, "5": 32e9}[generation] / 8 * 128 / 130  # transfers of one bit, line code off
        assert profile.host_link_bytes_per_s == pytest.approx(per_lane * int(lanes), rel=1e-3)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_rates_keep_the_ratios_of_the_hardware(profile):
    rates = profile.matmul_flops_per_s
    assert rates.get("bf16", 0) in (0, rates.get("fp16"))
    for narrow, wide in (("fp16-fp16acc", "fp16"), ("fp8", "fp16"), ("int8", "fp16"), ("fp4", "fp8"), ("fp16", "fp32")):
        if narrow in rates and wide in rates and not (narrow == "int8" and profile.architecture == "Volta"):
            assert rates[narrow] >= rates[wide]  # Volta's int8 is dp4a, outside its tensor cores


def test_names_are_unique_and_follow_the_rule():
    names = gpus() + [name for name in TABLES if name not in gpus()]
    assert len(gpus()) == len(set(gpus())) == sum(
        len(t["memory_bytes"]) if isinstance(t["memory_bytes"], list) else 1 for t in TABLES.values()
    )
    for name in names:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert not re.search(r"nvidia|geforce|amd|intel", name)
        assert name.startswith("apple-") == (gpu(name).vendor == "Apple")
    for name in ("rtx-4070-ti-super", "instinct-mi210", "arc-a770-16gb", "dgx-spark-gb10", "gb200-one-gpu"):
        assert gpu(name).name == name


def test_a_rate_that_nobody_gives_is_absent():
    assert set(gpu("dgx-spark-gb10").matmul_flops_per_s) == {"fp32", "fp4"}
    assert set(gpu("apple-m1-8-core-gpu").matmul_flops_per_s) == {"fp32"}
    assert gpu("apple-m4-max-core-count-unspecified").matmul_flops_per_s == {}
    assert gpu("apple-m4-max-core-count-unspecified").vector_flops_per_s is None
    assert set(gpu("p100-pcie-16gb").matmul_flops_per_s) == {"fp32"}
    assert gpu("dgx-spark-gb10").host_link_bytes_per_s is None


def test_fp32_products_run_at_the_vector_rate_except_on_cdna():
    for profile in PROFILES:
        if profile.architecture.startswith("CDNA"):
            assert "fp32" not in profile.matmul_flops_per_s
            assert "fp32" in profile.note
            assert profile.vector_flops_per_s
        else:
            assert profile.matmul_flops_per_s.get("fp32") == profile.vector_flops_per_s


def test_low_confidence_is_said():
    low = {profile.name for profile in PROFILES if profile.confidence == "low" and profile.vendor != "Apple"}
    assert low == {"h20-96gb", "h20-3e", "rtx-4090-d", "arc-pro-b60", "arc-pro-b50"}
    assert all(profile.confidence == "low" for profile in PROFILES if profile.vendor == "Apple")


@pytest.mark.parametrize("name", SIZES)
def test_each_memory_size_is_a_profile_and_the_bare_name_the_smallest(name):
    sized = [f"{name}-{size}gb" for size in SIZES[name]]
    assert [listed for listed in gpus() if listed.startswith(name + "-") and listed.endswith("gb")] == sized
    assert [gpu(each).memory_bytes for each in sized] == [size * 10**9 for size in SIZES[name]]
    assert gpu(name) == gpu(sized[0])
    assert name not in gpus()
    assert dataclasses.replace(gpu(sized[-1]), name=sized[0], memory_bytes=gpu(name).memory_bytes) == gpu(name)


def test_every_listed_name_gives_the_profile_of_that_name():
    assert [profile.name for profile in PROFILES] == gpus()


# ---- a name that is not there


def test_unknown_name_lists_the_close_ones():
    with pytest.raises(UnknownName, match=r"no GPU 'RTX-4091'; known: .*\brtx-4090\b") as caught:
        gpu("RTX-4091")
    assert len(caught.value.known) <= 8


def test_unknown_name_says_where_the_names_are_if_none_is_close():
    with pytest.raises(UnknownName, match="and 165 more .*--list-gpus") as caught:
        gpu("%%%%")
    assert caught.value.known[:8] == gpus()[:8]
    assert len(gpus()) == 8 + 165


@pytest.mark.parametrize("name", ["rtx-4060-ti-12gb", "rtx-4090-24gb", "rtx-4090-48gb", ""])
def test_a_size_that_is_not_sold_is_unknown(name):
    with pytest.raises(UnknownName):
        gpu(name)


@pytest.mark.parametrize("thing", [None, 4090, ["rtx-4090"]])
def test_neither_name_nor_path(thing):
    with pytest.raises(ProfileError, match=r"expected a name of costmodel\.gpus\(\)"):
        gpu(thing)


# ---- a user's own profile


def test_a_gpu_is_returned_as_it_is():
    mine = GPU("mine", 10**9, 1e11)
    assert gpu(mine) is mine


def test_bare_keys_and_one_table_are_read_alike(tmp_path):
    keys = MINIMAL + 'matmul_flops_per_s = { fp16 = 165.2e12 }\nvendor = "me"\n'
    bare = gpu(write(tmp_path, keys))
    assert bare == GPU("my-gpu", 24_000_000_000, 1008e9, {"fp16": 165.2e12}, vendor="me")
    assert gpu(str(write(tmp_path, "[card]\n" + keys))) == dataclasses.replace(bare, name="card")
    assert gpu(write(tmp_path, 'name = "other"\n' + keys)).name == "other"


def test_rates_may_be_a_table_of_their_own(tmp_path):
    assert gpu(write(tmp_path, MINIMAL + "[matmul_flops_per_s]\nfp8 = 1e15\n")).matmul_flops_per_s == {"fp8": 1e15}


def test_what_a_minimal_profile_does_not_say_is_unknown(tmp_path):
    profile = gpu(write(tmp_path, MINIMAL))
    assert profile == GPU("my-gpu", 24_000_000_000, 1008e9)
    assert isinstance(profile.memory_bytes, int)
    assert profile.matmul_flops_per_s == {} and profile.vector_flops_per_s is None and profile.source == ""


def test_several_sizes_in_any_order_mean_the_smallest(tmp_path):
    profile = gpu(write(tmp_path, "memory_bytes = [24e9, 8e9]\nmemory_bytes_per_s = 1008e9\n"))
    assert (profile.name, profile.memory_bytes) == ("my-gpu-8gb", 8_000_000_000)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    assert gpu(write(tmp_path, "\ufeff" + MINIMAL)).memory_bytes == 24_000_000_000


def test_a_profile_shipped_reads_the_same_as_a_users_file(tmp_path):
    text = FILE.read_text(encoding="utf-8")
    for name in ("rtx-4060-ti", "h100-sxm"):
        table = text[text.index(f"[{name}]\n"):].partition("\n\n")[0]
        assert gpu(write(tmp_path, table + "\n")) == gpu(name)


@given(
    memory=st.integers(10**6, 10**13),
    rate=st.floats(1e9, 1e15),
    rates=st.dictionaries(st.sampled_from(COMPUTE_FORMATS), st.floats(1e9, 1e17)),
)
def test_values_come_back_unchanged(tmp_path_factory, memory, rate, rates):
    inline = ", ".join(f"{name} = {value!r}" for name, value in rates.items())
    text = f"memory_bytes = {memory}\nmemory_bytes_per_s = {rate!r}\nmatmul_flops_per_s = {{ {inline} }}\n"
    profile = gpu(write(tmp_path_factory.mktemp("gpu"), text))
    assert (profile.memory_bytes, profile.memory_bytes_per_s, profile.matmul_flops_per_s) == (memory, rate, rates)


def test_missing_file(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.toml: cannot be read \(No such file.*\); give the path"):
        gpu(str(tmp_path / "none.toml"))


def test_a_folder_is_no_profile(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read"):
        gpu(tmp_path)


@pytest.mark.parametrize("content", [b"memory_bytes = \n", b"{}", b"\xff\xfe\x00", b"x = " + b"[" * 5000])
def test_malformed_file(tmp_path, content):
    path = tmp_path / "my-gpu.toml"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"my-gpu\.toml: is not TOML"):
        gpu(path)


def test_several_tables(tmp_path):
    message = error(tmp_path, f"[one]\n{MINIMAL}[two]\n{MINIMAL}")
    assert "holds 2 tables (one, two), expected one GPU a file" in message


@pytest.mark.parametrize("text", [MINIMAL + "bandwidth = 1e12\n", "[card]\n" + MINIMAL + "bandwidth = 1e12\n"])
def test_unknown_key_lists_the_known(tmp_path, text):
    assert "unknown key 'bandwidth'; known: name, memory_bytes, memory_bytes_per_s" in error(tmp_path, text)


@pytest.mark.parametrize("key", ["memory_bytes", "memory_bytes_per_s"])
def test_missing_key(tmp_path, key):
    text = "\n".join(line for line in MINIMAL.splitlines() if not line.startswith(key + " "))
    assert f"{key} is missing; give bytes" in error(tmp_path, text)


def test_empty_file(tmp_path):
    assert "memory_bytes is missing" in error(tmp_path, "")


@pytest.mark.parametrize("value", ["true", '"24 GB"', "{ a = 1 }", "[[24e9]]", "[]", "2024-01-01"])
def test_wrong_type_of_a_number(tmp_path, value):
    message = error(tmp_path, f"memory_bytes = {value}\nmemory_bytes_per_s = 1008e9\n")
    assert re.search(r"memory_bytes is .*, expected bytes as a number, such as 24e9", message)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1008e9", "1e-9", "1" + "0" * 400])
@pytest.mark.parametrize("key", ["memory_bytes_per_s", "vector_flops_per_s", "last_level_cache_bytes"])
def test_a_number_that_measures_nothing(tmp_path, key, value):
    text = f"memory_bytes = 24e9\n{key} = {value}\n"
    assert re.search(f"{key} is .*, expected .*, positive and finite", error(tmp_path, text))


@pytest.mark.parametrize(
    "line, hint",
    [
        ("memory_bytes_per_s = 3.35", "memory_bytes_per_s is 3.35, expected bytes per second; did you mean 3.35e12?"),
        ("memory_bytes_per_s = 1008", "did you mean 1008e9?"),
        ("memory_bytes_per_s = 1008000", "did you mean 1008000e6?"),
        ("memory_bytes = 24", "memory_bytes is 24, expected bytes; did you mean 24e9?"),
        ("memory_bytes = 24576", "did you mean 24576e6?"),
        ("memory_bytes = [8e9, 16]", "did you mean 16e9?"),
        ("vector_flops_per_s = 82.58", "expected FLOPs per second; did you mean 82.58e12?"),
        ("matmul_flops_per_s = { fp16 = 165.2 }", "matmul_flops_per_s.fp16 is 165.2, expected FLOPs per second"),
        ("matmul_flops_per_s = { fp16 = 165.2 }", "did you mean 165.2e12?"),
        ("host_link_bytes_per_s = 31.5", "did you mean 31.5e9?"),
        ("interconnect_bytes_per_s = 450", "did you mean 450e9?"),
        ("last_level_cache_bytes = 72", "did you mean 72e6?"),
    ],
)
def test_a_value_in_other_units_is_told_the_base_unit(tmp_path, line, hint):
    assert hint in error(tmp_path, line + "\n")


@given(value=st.floats(0.5, 999), scale=st.sampled_from([1.0, 1e3]))
def test_the_value_proposed_is_accepted(tmp_path_factory, value, scale):
    folder = tmp_path_factory.mktemp("gpu")
    proposed = error(folder, f"memory_bytes = 24e9\nmemory_bytes_per_s = {value * scale!r}\n")
    number = re.search(r"did you mean (\S+)\?", proposed)[1]
    profile = gpu(write(folder, f"memory_bytes = 24e9\nmemory_bytes_per_s = {number}\n"))
    assert 12e9 <= profile.memory_bytes_per_s <= 12e12  # GB/s from 12, TB/s below


def test_unknown_compute_format_lists_the_known(tmp_path):
    message = error(tmp_path, MINIMAL + "matmul_flops_per_s = { int4 = 1e15 }\n")
    assert "matmul_flops_per_s has 'int4', no compute format; known: fp32, fp16, fp16-fp16acc" in message


@pytest.mark.parametrize("value", ["1e15", "[1e15]", '"fast"'])
def test_rates_that_are_no_table(tmp_path, value):
    message = error(tmp_path, MINIMAL + f"matmul_flops_per_s = {value}\n")
    assert "expected a table of rates, such as { fp16 = 165.2e12 }" in message


@pytest.mark.parametrize("line", ["vendor = 3", "note = ['a']", "name = true", "source = { a = 1 }"])
def test_wrong_type_of_a_text(tmp_path, line):
    assert "expected text in quotes" in error(tmp_path, MINIMAL + line + "\n")


def test_profile_errors_are_the_callers_fault():
    assert issubclass(ProfileError, InputError)
