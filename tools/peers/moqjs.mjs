// Subscribes to a track with @moq/net: MoQT on QMux, over TLS on TCP. Beside it are its packages.
//
//     node worker.mjs PORT DRAFT PATH TRACK
//
// DRAFT is the ALPN of one, such as moqt-20. Prints a line of JSON for each thing that happens: the version of MoQT,
// "subscribed", and the number and the SHA-256 of each group. Its packages know QMux in WebSockets only; there a message
// is one record, so each record of the TCP connection is passed on as a message.

import { createHash } from "node:crypto";
import tls from "node:tls";

// What Node 20 lacks.
Promise.withResolvers ??= function () {
	let resolve, reject;
	const promise = new Promise((...both) => ([resolve, reject] = both));
	return { promise, resolve, reject };
};
Set.prototype.difference ??= function (other) {
	return new Set([...this].filter((one) => !other.has(one)));
};

const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
console.debug = (said) => String(said).startsWith("subscribe ok") && say("subscribed");
console.warn = () => {};
const { default: Session } = await import("@moq/qmux");
const { Connection } = await import("@moq/net");

// The first record of some bytes and where the next one begins; undefined if it is incomplete.
function record(data) {
	const head = data.length ? 1 << (data[0] >> 6) : 1;
	if (data.length < head) return undefined;
	let size = data[0] & 0x3f;
	for (let at = 1; at < head; at++) size = size * 256 + data[at];
	return data.length < head + size ? undefined : [new Uint8Array(data.subarray(head, head + size)), head + size];
}

// A connection as a WebSocketStream.
function messages(socket, protocol) {
	const readable = new ReadableStream({
		start(controller) {
			let held = Buffer.alloc(0);
			socket.on("data", (data) => {
				held = Buffer.concat([held, data]);
				for (let found; (found = record(held)); held = held.subarray(found[1])) {
					controller.enqueue(found[0]);
				}
			});
			socket.on("end", () => controller.close());
		},
	});
	const writable = new WritableStream({
		write(data) {
			const head = Buffer.alloc(4);
			head.writeUInt32BE(0x80000000 + data.byteLength);
			return new Promise((done) => socket.write(Buffer.concat([head, data]), done));
		},
	});
	const closed = new Promise((done) => socket.on("close", () => done({ closeCode: 1000, reason: "" })));
	return { opened: Promise.resolve({ readable, writable, protocol }), closed, close: () => socket.end() };
}

async function digest(group) {
	const hash = createHash("sha256");
	for (let frame; (frame = await group.readFrame()); ) hash.update(frame.payload);
	return hash.digest("hex");
}

const [port, draft, path, name] = process.argv.slice(2);
const protocol = `qmux-01.${draft}`;
const socket = tls.connect({ port, host: "127.0.0.1", rejectUnauthorized: false, ALPNProtocols: [protocol] });
await new Promise((done) => socket.once("secureConnect", done));
const transport = new Session(messages(socket, socket.alpnProtocol));
await transport.ready;
const connection = await Connection.connect(new URL(`https://127.0.0.1:${port}/`), { transport });
say(connection.version);
const track = connection.consume(path).subscribe(name);
for (let group; (group = await track.recvGroup()); ) say([group.sequence, await digest(group)]);
