export * from "./grpc.js";
export * from "./http.js";
export * from "./socket.js";
export type { components, paths } from "./gen/openapi.js";
export * from "./gen/fairway/v1/inference_pb.js";
