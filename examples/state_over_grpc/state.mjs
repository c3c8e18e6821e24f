// The state of a run over gRPC, from Node: what state.py does, with @grpc/grpc-js and Penstock's .proto files.
//
//     npm ci
//     PENSTOCK_PROTO=../../proto PENSTOCK_TOKEN=... node state.mjs unix:/home/me/.local/state/penstock/socket myjob/0
import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const { PENSTOCK_INSECURE, PENSTOCK_PROTO, PENSTOCK_TLS_CA, PENSTOCK_TOKEN } = process.env;
const [address, run] = process.argv.slice(2);

// longs: 64-bit numbers as text, for JavaScript's own have 53 bits.
const definition = protoLoader.loadSync("penstock/proto/v1/coordinator.proto", {
  includeDirs: [PENSTOCK_PROTO],
  defaults: true, // fields that are not sent are 0 or ""
  keepCase: true,
  longs: String,
  enums: String,
});
const { Coordinator } = grpc.loadPackageDefinition(definition).penstock.proto.v1;
if (!PENSTOCK_TLS_CA && !address.startsWith("unix:") && PENSTOCK_INSECURE !== "true") {
  console.error(`the token would go to ${address} in clear text: set PENSTOCK_TLS_CA=FILE, or PENSTOCK_INSECURE=true`);
  process.exit(1);
}
const credentials = PENSTOCK_TLS_CA
  ? grpc.credentials.createSsl(readFileSync(PENSTOCK_TLS_CA))
  : grpc.credentials.createInsecure();
const client = new Coordinator(address, credentials);
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${PENSTOCK_TOKEN}`);

const records = [];
const request = { run, newest: true, deadline_s: 60, format: "STATE_JSON" };
for await (const part of client.FetchState(request, metadata, { deadline: Date.now() + 90_000 })) {
  if (part.record) records.push({ record: part.record, data: [] }); // large states continue in parts without one
  records.at(-1).data.push(part.data);
}
for (const { record, data } of records) {
  const state = JSON.parse(Buffer.concat(data).toString());
  const line = {
    worker: record.box * record.num_workers_per_box + record.local_worker_id,
    step: Number(record.step),
    worker_step: Number(record.worker_step),
    samples_streamed: Number(record.samples_streamed),
    user_state_dict: state && state.user,
  };
  console.log(JSON.stringify(line));
}
client.close();
