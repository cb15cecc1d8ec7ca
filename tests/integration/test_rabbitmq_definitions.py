"""Enforcement of the committed RabbitMQ definitions by a broker."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from ops.broker import PrivateNode
from ops.generate.definitions import definitions, render
from shared.broker import topology
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.protocol import BindingSpec, OutMessage, PublishOutcome, QueueSpec, Settlement
from shared.client import BrokerUnavailableError, RequestError, connect
from shared.contracts.errors import BrokerAccessError, BrokerConflictError
from tests.brokers import eventually

VHOST = "definitions-test"
HELLO = OutMessage(body=b"hello")
LANE = "lane.1.tiny.high.3.short"

Login = Callable[[str], AbstractAsyncContextManager[AmqpBroker]]


@pytest.fixture(scope="module")
def login(private_node: PrivateNode, tmp_path_factory: pytest.TempPathFactory) -> Login:
    """Connect as a user of the definitions."""
    file = tmp_path_factory.mktemp("definitions") / "definitions.json"
    file.write_text(render(definitions(vhost=VHOST)))
    private_node.ctl("import_definitions", str(file))

    def connect(user: str) -> AmqpBroker:
        url = f"amqp://{user}:{user}@127.0.0.1:{private_node.port}/{VHOST}"
        return AmqpBroker(url, client_name=f"test {user}")

    return connect


@pytest.mark.rabbitmq
@pytest.mark.slow
class TestEnforced:
    async def test_services_find_the_topology_that_they_would_declare(self, login: Login):
        async with login("headway-planner") as planner:
            for spec in (*topology.QUEUES, *topology.DELAY_QUEUES):
                await planner.declare_queue(spec)
            for binding in (*topology.BINDINGS, *topology.DELAY_BINDINGS):
                await planner.bind(binding)

    async def test_services_without_permission_skip_declaring(self, login: Login):
        async with login("headway-agent") as agent:
            await topology.declare(agent)

            assert await agent.depth(topology.LEADER) is not None

    async def test_one_agent_at_a_time_claims_a_model(self, login: Login):
        claim = topology.claim_queue("some/model.1")
        async with login("headway-agent") as one, login("headway-agent") as other:
            await one.declare_queue(claim)
            with pytest.raises(BrokerConflictError):
                await other.declare_queue(claim)
            await one.delete_queue(claim.name)
            await other.declare_queue(claim)
            await other.delete_queue(claim.name)

    async def test_a_producer_submits_cancels_and_reads_its_own_replies(self, login: Login):
        queue, binding = topology.reply_queue("reply.acme.1")
        async with login("producer") as producer, login("headway-agent") as agent:
            await producer.declare_queue(queue)
            await producer.bind(binding)
            request = OutMessage(body=b"{}", user_id="producer", reply_to=queue.name)

            assert PublishOutcome.CONFIRMED is await producer.publish(
                topology.REQUESTS, topology.INTERACTIVE_KEY, request
            )
            outcomes = {
                topology.CONTROL_CANCEL: PublishOutcome.CONFIRMED,  # kept for later agents
                topology.control_instance("i1"): PublishOutcome.UNROUTABLE,
            }
            for key, outcome in outcomes.items():
                assert outcome is await producer.publish(topology.CONTROL, key, HELLO)
            await agent.publish(topology.REPLIES, queue.name, HELLO)
            replies = []

            async def replied() -> bool:
                replies.append(await producer.get(queue.name))
                return replies[-1] is not None

            await eventually(replied)
            assert replies[-1].body == b"hello"
            await producer.delete_queue(queue.name)

    async def test_the_client_needs_the_rights_of_a_producer_only(
        self, login: Login, private_node: PrivateNode
    ):
        del login  # it has imported the users
        url = f"amqp://producer:producer@127.0.0.1:{private_node.port}/{VHOST}"
        async with connect(url) as client:
            answer = await client.submit(model="m", prompt="hello")
            await answer.cancel()
            with pytest.raises(RequestError, match="cancelled"):
                await answer.wait()
            with pytest.raises(BrokerUnavailableError, match="no planner"):
                await client.status("r1", timeout_s=0.1)

    @pytest.mark.parametrize(
        ("exchange", "key", "message"),
        [
            (topology.LANES, LANE, HELLO),
            ("", topology.GLOBAL_INTERACTIVE, HELLO),
            (topology.PLANS, "i1", HELLO),
            (topology.REPLIES, "reply.other.1", HELLO),
            (topology.CONTROL, topology.CONTROL_LANE, HELLO),
            (topology.CONTROL, topology.command_instance("i1"), HELLO),
            (topology.REQUESTS, topology.REST_KEY, OutMessage(body=b"{}", user_id="operator")),
        ],
        ids=[
            "lanes",
            "default exchange",
            "plans",
            "others' replies",
            "lane notices",
            "operators' commands",
            "forged user",
        ],
    )
    async def test_a_producer_may_not_publish_elsewhere(
        self, login: Login, exchange: str, key: str, message: OutMessage
    ):
        async with login("producer") as producer:
            with pytest.raises(BrokerAccessError):
                await producer.publish(exchange, key, message)

    async def test_a_producer_may_not_read_work_or_declare_other_names(self, login: Login):
        async with login("headway-planner") as planner, login("producer") as producer:
            await topology.declare_work_queue(planner, LANE)
            for operation in (
                producer.get(LANE),
                producer.get(topology.GLOBAL_INTERACTIVE),
                producer.purge(LANE),
                producer.delete_queue(LANE),
                producer.declare_queue(QueueSpec(name="lane.mine")),
                producer.bind(
                    BindingSpec(exchange=topology.TELEMETRY, queue="reply.x", routing_key="#")
                ),
            ):
                with pytest.raises(BrokerAccessError):
                    await operation

    async def test_an_agent_pulls_evicts_and_answers_but_cannot_submit(self, login: Login):
        async with login("headway-planner") as planner, login("headway-agent") as agent:
            await topology.declare_work_queue(planner, LANE)
            await planner.publish(topology.LANES, LANE, HELLO)
            pulled = []

            async def got() -> bool:
                pulled.append(await agent.get(LANE))
                return pulled[-1] is not None

            await eventually(got)
            await topology.declare_work_queue(agent, "resume.1.tiny.3")
            plan, plan_binding = topology.plan_queue("i1", "agent.i1.1")
            await agent.declare_queue(plan)
            await agent.bind(plan_binding)

            assert PublishOutcome.CONFIRMED is await agent.publish(
                topology.LANES, "resume.1.tiny.3", HELLO
            )
            assert PublishOutcome.CONFIRMED is await agent.publish(topology.UNCLAIMED, "x", HELLO)
            assert await pulled[-1].settle(Settlement.ACK) is True
            for exchange in (topology.REQUESTS, topology.PLANS, topology.PROFILES):
                with pytest.raises(BrokerAccessError):
                    await agent.publish(exchange, "k", HELLO)

    async def test_a_producers_own_queue_is_bounded_by_policy(
        self, login: Login, private_node: PrivateNode
    ):
        async with login("producer") as producer:
            await producer.declare_queue(QueueSpec(name="reply.acme.unbounded"))
            listed = private_node.ctl("list_queues", "-p", VHOST, "name", "policy")

            assert "reply.acme.unbounded\theadway-replies" in listed
            assert "headway-replies" in listed.split("reply.acme.unbounded")[1].splitlines()[0]
            await producer.delete_queue("reply.acme.unbounded")
