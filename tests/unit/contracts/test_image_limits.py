"""Limits of images and rules for their URLs."""

from collections.abc import Callable

import pytest

from shared.api.images import ImageLimits, check_num_bytes, check_number, check_pixels, check_url
from shared.contracts.errors import ContractError

LIMITS = ImageLimits(max_images=2, max_bytes=100, max_pixels=1000)
HOSTS = {"images.example"}


def test_images_at_the_limits_are_accepted():
    check_number(2, LIMITS)
    check_num_bytes(100, LIMITS)
    check_pixels(20, 50, LIMITS)


@pytest.mark.parametrize(
    ("check", "limit"),
    [
        (lambda: check_number(3, LIMITS), "limit is 2"),
        (lambda: check_num_bytes(101, LIMITS), "limit is 100 bytes"),
        (lambda: check_pixels(1001, 1, LIMITS), "limit is 1000 pixels"),
    ],
)
def test_refusal_names_the_field_and_the_limit(check: Callable[[], None], limit: str):
    with pytest.raises(ContractError, match=limit) as refused:
        check()

    assert refused.value.status == 400
    assert refused.value.param == "image_url"
    assert "image_url" in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,AAAA",
        "DATA:image/png;base64,AAAA",
        "https://images.example/a.png",
        "http://IMAGES.example:8080/a.png?b=c",
    ],
)
def test_data_urls_and_allowed_hosts_are_read(url: str):
    check_url(url, HOSTS)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://images.example/a.png",
        "http://other.example/a.png",
        "https://images.example.other/a.png",
        "http://images.example@other.example/a.png",
        "http://other.example\\@images.example/a.png",
        "http://other.example /a.png",
        "http://[::1/a.png",
        "http://127.0.0.1/a.png",
        "/etc/passwd",
        "",
    ],
)
def test_other_urls_are_refused_by_name(url: str):
    with pytest.raises(ContractError, match="image_url") as refused:
        check_url(url, HOSTS)

    assert refused.value.param == "image_url"


def test_no_host_is_read_by_default():
    with pytest.raises(ContractError, match="allowed_media_hosts"):
        check_url("https://images.example/a.png", ())
