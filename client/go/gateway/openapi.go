package gateway

import (
	_ "embed"
	"net/http"
)

// document describes every route and every field; a test holds it against routes.go and the tables of fields.
//
//go:embed openapi.json
var document []byte

func openAPI(_ *deps, x *exchange) error {
	return x.send(http.StatusOK, "application/json", document)
}
