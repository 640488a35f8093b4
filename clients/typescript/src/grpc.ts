// The gRPC API, with the types of its protos.
import { createClient, type Client, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { InferenceService } from "./gen/fairway/v1/inference_pb.js";

export type InferenceClient = Client<typeof InferenceService>;

/** Return a client of `InferenceService`; `baseUrl` is `http://HOST:PORT` of a gateway's gRPC port. */
export function inferenceClient(baseUrl: string, apiKey: string): InferenceClient {
  const authorise: Interceptor = (next) => (request) => {
    request.header.set("authorization", `Bearer ${apiKey}`);
    return next(request);
  };
  return createClient(InferenceService, createGrpcTransport({ baseUrl, interceptors: [authorise] }));
}
