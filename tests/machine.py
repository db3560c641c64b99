"""What this machine lets a lab do."""

import pytest

from poise.errors import InvalidSetting
from poise.lab import Quota
from poise.lab.leftovers import lab_name
from poise.lab.network import check_privileges
from poise.lab.quota import make_parent


def quotas_work() -> bool:
    parent = make_parent(lab_name(99))
    if parent is not None:
        Quota(parent).remove()
    return parent is not None


def namespaces_work() -> bool:
    try:
        check_privileges()
    except InvalidSetting:
        return False
    return True


needs_quotas = pytest.mark.skipif(not quotas_work(), reason="no control group can be made here")
needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="needs root and iproute2")
