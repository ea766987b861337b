"""An agent finds its supervisor where its ssh session came from, and keeps what only its host knows."""

from __future__ import annotations

import msgspec

from phoenix_launch.bootstrap import OutputSettings
from phoenix_launch.node.arrival import arrived
from tests.bootstraps import bootstrap

SESSION = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.7 22", "HOME": "/home/there", "LANG": "C"}


def test_a_supervisor_that_listens_everywhere_is_dialled_where_the_session_came_from() -> None:
    given = msgspec.structs.replace(
        bootstrap(), simulated=False, control_endpoint="tcp://0.0.0.0:77", output_endpoint="tcp://0.0.0.0:78"
    )
    here = arrived(given, SESSION)
    assert (here.control_endpoint, here.output_endpoint) == ("tcp://10.0.0.1:77", "tcp://10.0.0.1:78")
    assert here.address == "10.0.0.7"


def test_version_6_addresses_get_their_brackets() -> None:
    given = msgspec.structs.replace(bootstrap(), simulated=False, control_endpoint="tcp://0.0.0.0:77")
    assert arrived(given, {"SSH_CONNECTION": "fd00::1 1 fd00::2 22"}).control_endpoint == "tcp://[fd00::1]:77"


def test_an_interface_that_was_asked_for_decides_the_address() -> None:
    given = msgspec.structs.replace(bootstrap(), simulated=False, interface="ib0")
    assert arrived(given, SESSION).address == given.address


def test_the_jobs_environment_lies_over_the_login_sessions() -> None:
    given = msgspec.structs.replace(bootstrap(), simulated=False, environment={"LANG": "en_US.UTF-8", "RATE": "0.1"})
    environment = arrived(given, SESSION | {"PHOENIX_JOB_KEY": "k"}).environment
    assert environment == {"HOME": "/home/there", "LANG": "en_US.UTF-8", "RATE": "0.1"}


def test_a_simulated_node_takes_everything_as_it_is() -> None:
    given = msgspec.structs.replace(bootstrap(), simulated=True)
    assert arrived(given, SESSION) == given


def test_folders_without_a_root_lie_where_the_user_of_this_host_keeps_jobs() -> None:
    output = OutputSettings(folder="job-1/logs/h1", torchrun_folder="job-1/logs/run_h1")
    given = msgspec.structs.replace(bootstrap(), simulated=False, output=output)
    here = arrived(given, SESSION).output
    jobs = "/home/there/.local/state/phoenix/jobs"
    assert (here.folder, here.torchrun_folder) == (f"{jobs}/job-1/logs/h1", f"{jobs}/job-1/logs/run_h1")
    given = msgspec.structs.replace(given, output=OutputSettings(folder="/scratch/logs/h1"))
    assert arrived(given, SESSION).output == given.output
